"""RewardWorker and CostWorker: scores of responses, from a model or from Python functions (paper, table 4)."""

from __future__ import annotations

from hybridflow.batch.batch import Batch
from hybridflow.workers.scoring import ScoreWorker, scores


class RewardWorker(ScoreWorker):
    """One rank of a reward model (a sequence-classification checkpoint), or of Python functions.

    Functions: `function(prompts, completions, **columns) -> list[float]` (or several, with `weights`) gets texts and
    the columns of the batch that it names; with a first parameter named `prompt` it is called row by row. See
    `hf.rewards` for all conventions. Ranks work on their share of the rows, so a function must not rely on seeing the
    whole batch. With `workers` it runs in that many worker processes per rank, each call within `timeout` seconds.
    A row that fails raises; with `on_failure="zero"` it gets 0, and with "mask" it leaves training as well.
    `tokenizer` is needed when the batch has token ids and no texts.

    Models: `tokenizer` is the actor's. Where the model's own differs, rows are decoded and encoded anew: chat messages
    in `prompt` through the model's chat template, texts as prompt + response. `template="chat"` puts every row through
    the template, "plain" none. With `offload=True` the model waits in host memory between calls.

    `level="token"`: a reward for every response token (of a model, its head at the token's position).
    """

    role = "reward"

    @scores("reward")
    def compute_reward(self, batch: Batch) -> Batch | None:
        """`rewards` [B] float32, or ragged [B, R] float32 at level "token".

        Several functions also write `rewards/<name>` [B] float32 each, NaN where one does not apply. Unless
        `on_failure` is "raise", `reward_failure` is a reason or None per row, and with "mask" `response_mask` has no
        token left of rows that failed.

        Errors: RewardError naming the function and the row; never a silent 0.
        """
        return self._scored("compute_reward", batch)


class CostWorker(ScoreWorker):
    """One rank of a cost model, or of Python functions that say how much harm a response does.

    Its settings are those of a RewardWorker. A cost above 0 is unwanted: training keeps its mean below a limit (Dai et
    al., "Safe RLHF", 2023).
    """

    role = "cost"

    @scores("cost")
    def compute_cost(self, batch: Batch) -> Batch | None:
        """`costs` [B] float32, or ragged [B, R] float32 at level "token"; as `compute_reward` of a RewardWorker, with
        components `costs/<name>` and `cost_failure`.

        Errors: RewardError naming the function and the row; never a silent 0.
        """
        return self._scored("compute_cost", batch)
