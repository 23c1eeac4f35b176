"""How reward functions are called: signatures as in TRL and verl, and what would go in for something else."""

from __future__ import annotations

import pytest
import torch

from hybridflow.batch.ragged import Ragged
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards import Functions, from_compute_score, per_row
from tests.called_rewards import CalledReward as FunctionReward

PROMPTS, RESPONSES = ["1+1=", "1+2=", "2+2="], ["2", "4", "4"]
IDS = Ragged.from_rows([[5], [6, 7], [8]])
COLUMNS = {"answer": ["2", "3", "4"], "response_ids": IDS}
RIGHT = [1.0, 0.0, 1.0]


def equal(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def soft_overlong(completion_ids, **kwargs):
    return [float(-len(ids)) for ids in completion_ids]


def repetition(prompts, answer, **kwargs):
    assert prompts == PROMPTS
    return equal(kwargs["completions"], answer)


def only_columns(answer, **kwargs):
    return equal(kwargs["completions"], answer)


def from_ids(completion_ids, answer, **kwargs):
    return equal(kwargs["completions"], answer)


def nothing_but_kwargs(*args, **kwargs):
    assert args == ()
    assert sorted(kwargs) == ["answer", "completion_ids", "completions", "prompts"]
    return equal(kwargs["completions"], kwargs["answer"])


def logs(completions, answer, log_extra, log_metric=None, **kwargs):
    log_extra("answers", answer)
    log_metric("accuracy", 0.5)
    return equal(completions, answer)


@pytest.mark.parametrize("workers", [0, 1])
def test_trl_functions_need_not_name_completions(workers):
    """Nor columns: and the figures that they log go nowhere."""
    functions = Functions([repetition, only_columns, from_ids, nothing_but_kwargs, logs], workers=workers)
    assert functions.reads is None
    found = functions(PROMPTS, RESPONSES, COLUMNS).components
    assert [column.tolist() for column in found.values()] == [RIGHT] * 5
    functions.close()


def test_trl_functions_of_ids_alone():
    reward = FunctionReward(soft_overlong)
    assert reward(PROMPTS, RESPONSES, COLUMNS) == [-1.0, -2.0, -1.0]
    with pytest.raises(RewardError, match="soft_overlong needs the column 'response_ids'"):
        reward(PROMPTS, RESPONSES, {"answer": ["2", "3", "4"]})
    assert (
        FunctionReward(lambda prompts, **kwargs: list(map(len, kwargs["completions"])))(PROMPTS, RESPONSES) == [1] * 3
    )


def test_chat_prompts_of_functions_that_do_not_name_completions():
    chat = [[{"role": "user", "content": "1+1="}]]
    assert FunctionReward(lambda **kwargs: [len(kwargs["completions"][0])])(chat, ["2"]) == [1]
    assert FunctionReward(lambda **kwargs: [float(kwargs["completions"][0][0]["content"])])(chat, ["2"]) == [2.0]


@pytest.mark.parametrize(
    "function",
    [
        lambda prompts, answer: [1.0] * 3,
        lambda texts, responses: [1.0] * 3,
        lambda prompt, response: 1.0,
        lambda prompt, completions: 1.0,
        lambda *texts: [1.0] * 3,
        lambda completions, /: [1.0] * 3,
    ],
)
def test_other_signatures_are_refused_with_the_adapter_that_they_need(function):
    with pytest.raises(ConfigError, match=r"<lambda>\(.*must take \(prompts, completions.*per_row.*from_compute_score"):
        FunctionReward(function)


def test_per_row_refuses_functions_without_two_texts():
    with pytest.raises(ConfigError, match=r"must take \(prompt, response"):
        per_row(lambda prompt: 1.0)
    assert per_row(lambda text, said, /, answer, level=0: 1.0).reads == ("answer", "level?")
    assert per_row(lambda *texts: 1.0).reads == ()


def test_what_hybridflow_writes_per_token_is_only_given_by_name():
    written = {
        "log_probs": Ragged.from_rows([[0.1], [0.2, 0.3], [0.4]]),
        "rewards/format": torch.ones(3),
        "row_id": torch.arange(3),
    }
    seen = {}

    def everything(completions, row_id, **kwargs):
        seen.update(kwargs, row_id=row_id)
        return [0.0] * 3

    FunctionReward(everything)(PROMPTS, RESPONSES, COLUMNS | written)
    assert sorted(seen) == ["answer", "completion_ids", "prompts", "rewards/format", "row_id"]
    assert seen["row_id"] == [0, 1, 2]

    @per_row
    def row(prompt, response, **columns):
        assert set(columns) == {"answer", "rewards/format", "row_id"}
        return 1.0

    assert FunctionReward(row)(PROMPTS, RESPONSES, COLUMNS | written) == [1.0] * 3


def test_there_is_no_state_of_a_trainer():
    with pytest.raises(ConfigError, match=r"'trainer_state': there is no trainer .* default"):
        Functions(lambda completions, trainer_state, **kwargs: [0.0])

    def optional(completions, trainer_state=None):
        return [float(trainer_state is None)] * 3

    assert FunctionReward(optional).reads == ()
    assert FunctionReward(optional)(PROMPTS, RESPONSES, COLUMNS | {"trainer_state": [1, 2, 3]}) == [1.0] * 3


def test_verifiers_that_take_everything_by_name():
    class Verifier:
        reads = ("answer",)

        def __call__(self, **columns):
            assert sorted(columns) == ["answer", "completion_ids", "completions", "prompts"]
            return equal(columns["completions"], columns["answer"])

    assert FunctionReward(Verifier()).reads == ("answer", "response_ids?")
    assert FunctionReward(Verifier())(PROMPTS, RESPONSES, COLUMNS | {"level": [1, 2, 3]}) == RIGHT


def needs_info(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info.get("bonus", 0.0))


async def awaited(data_source, solution_str, ground_truth):
    return float(solution_str == ground_truth)


def test_compute_score_without_extra_info():
    columns = {"data_source": ["sums"] * 3, "ground_truth": ["2", "3", "4"]}
    reward = FunctionReward(from_compute_score(needs_info))
    assert reward(PROMPTS, RESPONSES, columns) == [0.0] * 3
    assert reward(PROMPTS, RESPONSES, columns | {"extra_info": [{"bonus": 0.5}, {}, {}]}) == [0.5, 0.0, 0.0]
    with pytest.raises(ConfigError, match=r"components='acc'.*components=\('acc',\)"):
        from_compute_score(needs_info, components="acc")


@pytest.mark.parametrize("function", [needs_info, awaited])
@pytest.mark.parametrize(
    ("given", "message"),
    [({"style": "rule"}, r"its entries are \['style'\]"), ("rule", "it is 'rule'"), (None, "it is None")],
)
def test_entries_that_are_missing_are_named(function, given, message):
    adapted = from_compute_score(function, data_source=None, ground_truth="reward_model.ground_truth")
    columns = {"reward_model": [{"ground_truth": "2"}, given, {"ground_truth": "4"}]}
    with pytest.raises(
        RewardError,
        match=rf"{function.__name__} at row 1: column 'reward_model' has no entry 'ground_truth'; {message}\. Mend",
    ):
        Functions(adapted)(PROMPTS, RESPONSES, columns)
    scores = Functions(adapted, on_failure="zero")(PROMPTS, RESPONSES, columns)
    assert [failure is None for failure in scores.failures] == [True, False, True]


@pytest.mark.parametrize("number", [10**400, -(10**400), 10**5000], ids=["large", "negative", "larger"])
def test_integers_beyond_any_float_are_wrong_answers(number):
    with pytest.raises(RewardError, match=r"returned .* at row 0; it does not fit float32"):
        FunctionReward(per_row(lambda prompt, response: number))(PROMPTS, RESPONSES)


@pytest.mark.parametrize("settings", [{"weights": [10**400]}, {"timeout": 10**400}])
def test_settings_beyond_any_float_are_refused(settings):
    with pytest.raises(ConfigError, match="1000"):
        Functions(equal, **settings)
