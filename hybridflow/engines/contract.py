"""Types shared by engines: outputs and states of a train engine, and the interface of a generation engine.

A training framework implements `sharded_model.ShardedModel`. A loss sees flat token values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast, get_args

from torch import Tensor

from hybridflow.config import Sampling, Until
from hybridflow.engine3d.interfaces import Generator
from hybridflow.engines.row_images import RowImages
from hybridflow.topology import GenerationGrid

Output = Literal["log_probs", "entropy", "values", "logits", "ref_logits"]
"""Outputs that a loss can ask for; `logits` and `ref_logits` (the teacher's) are `algorithms.logits.Logits`."""
TrainState = Literal["parameters", "optimizer", "gradients"]
"""State of a train engine that can move between device and host memory."""
STATES: tuple[TrainState, ...] = get_args(TrainState)
PARAMETERS: tuple[TrainState, ...] = ("parameters",)


class Uninitialized:
    """Replaces a checkpoint: weights stay undefined, because a transfer will write them."""


UNINITIALIZED = Uninitialized()


@dataclass(slots=True)
class Row:
    """One response, unfinished or finished: the `index`-th of the prompt `row_id`.

    Plain values: `Row(**json.loads(json.dumps(dataclasses.asdict(row))))` equals the row. An unfinished row can be
    continued by any engine of the model. The draw of a token depends on `seed` and its position in the response only.
    `log_probs` are those of the sampling policy, and `policy_version` its version, token by token.
    `spans` counts the times that an engine took the row up, `recomputed` the tokens that it computed again for that
    (fewer where its prefix cache has them), `prefilled` those that it computed before it sampled. The KV cache of a row
    that is `kept` stays when it ends, if there is room: a row of its name whose prompt begins with its tokens uses it.
    `routed_experts` [tokens, layers, k] are the experts that the layers with some have computed its first tokens with
    (of prompt and response, all but the last), of a finished row of an engine that captures them. A row with `images`
    stays in its engine.
    """

    row_id: int
    index: int
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    policy_version: list[int] = field(default_factory=list)
    end: Literal["", "stop", "length"] = ""  # "stop": by a stop token or stop string
    spans: int = 0
    recomputed: int = 0
    prefilled: int = 0
    kept: bool = False
    routed_experts: Tensor | None = field(default=None, compare=False)
    images: RowImages | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if isinstance(given := cast("object", self.sampling), Mapping):
            self.sampling = Sampling(**given)

    @property
    def name(self) -> str:
        """Unique in an engine."""
        return f"{self.row_id}.{self.index}"

    @property
    def finished(self) -> bool:
        """Whether the model ended the response, rather than its length."""
        return self.end == "stop"


class RowSource(Protocol):
    """Gives rows to an engine as they come up, such as the turns of conversations."""

    @property
    def under_way(self) -> int:
        """How many things are not done that rows may still come from."""
        ...

    def poll(self, seconds: float) -> list[Row] | None:
        """Further rows without tokens, with ids below 0, waiting up to `seconds` for the first; None: there will be no
        more, or not now."""
        ...

    def finished(self, row: Row) -> None:
        """The row has been sampled."""
        ...

    def refused(self, row: Row, why: str, full: bool) -> None:
        """The row cannot be sampled; `full`: its prompt leaves no room for a response."""
        ...

    def done(self) -> list[str]:
        """The names, since the last call, of rows that are `kept` and that no further row will continue."""
        ...


class GenerateEngine(Generator, Protocol):
    """One rank of a sharded model that generates.

    A session: `submit` rows, `advance` them, `take` the finished ones; `generate` is the three in a row. All ranks of
    one generation replica make the same calls with the same rows and get the same results. Tokens
    record `policy_version`: `weights_changed` counts it from 0, and the owner may set it between two calls.
    """

    grid: GenerationGrid

    @property
    def policy_version(self) -> int:
        """The version of the present weights."""
        ...

    @policy_version.setter
    def policy_version(self, version: int) -> None: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        names: Sequence[int] | None = None,
        images: Sequence[RowImages | None] | None = None,
    ) -> list[list[Row]]:
        """`sampling.n` finished rows of each prompt; `seeds` one per prompt, so results do not depend on the split
        (on CUDA only to rounding: a row's logits depend on the rows beside it).

        `names`, one per prompt, are what error messages call them (default: their positions); `images` are theirs.
        """
        ...

    def new_rows(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        row_ids: Sequence[int] | None = None,
        images: Sequence[RowImages | None] | None = None,
    ) -> list[Row]:
        """`sampling.n` rows of each prompt, without tokens."""
        ...

    def submit(self, rows: Sequence[Row]) -> None:
        """Take up copies of unfinished rows; those with tokens are continued."""
        ...

    def advance(self, until: Until = ...) -> None:
        """Decode all unfinished rows until `until`."""
        ...

    def advance_while(self, going: Callable[[], bool]) -> None:
        """Decode all unfinished rows as long as `going()` on the replica's first rank, and for a moment more."""
        ...

    @property
    def is_first(self) -> bool:
        """Whether this is the replica's first rank, whose outputs are collected."""
        ...

    @property
    def no_routing(self) -> Tensor | None:
        """[0, layers, k]: `routed_experts` of a row without computed tokens; None where they are not captured."""
        ...

    def serve(self, source: RowSource | None, kept: set[str] | None = None) -> int:
        """Decode the rows that `source` gives until it has no more (None on all but the replica's first rank), or, with
        `kept`, until it pauses: unfinished rows of it stay, and `kept` names them. Returns what it has under way."""
        ...

    def restrict(self, tokens: int) -> None:
        """Sample ids below `tokens` only, those of the tokenizer, and the stop tokens."""
        ...

    def abandon(self, names: set[str]) -> None:
        """Forget rows that `serve` has kept, finished or not, and what is kept of those that have ended."""
        ...

    def take(self) -> list[Row]:
        """The finished rows that were not taken yet, in the order in which they finished."""
        ...

    def withdraw(self, names: Collection[str] | None = None) -> list[Row]:
        """The unfinished rows (with these names), in the order of `submit`. The engine forgets them."""
        ...

    @property
    def unfinished(self) -> list[Row]:
        """The unfinished rows as they are now, in the order of `submit`; they stay the engine's."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Current bytes of the KV cache."""
        ...

    def close(self) -> None:
        """Shut the engine down. May be called twice."""
        ...
