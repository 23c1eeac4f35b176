"""Reward functions: every convention and signature, and an error with function and row instead of a made-up number."""

from __future__ import annotations

import asyncio
import functools
import math

import numpy as np
import pytest
import torch

from hybridflow.batch.ragged import Ragged
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards import Functions, from_compute_score, per_row
from tests.called_rewards import CalledReward as FunctionReward

PROMPTS, RESPONSES = ["1+1=", "1+2=", "2+2="], ["2", "4", "4"]
COLUMNS = {"answer": ["2", "3", "4"], "level": torch.tensor([1, 2, 3]), "ids": Ragged.from_rows([[1], [2, 3], []])}


def test_a_function_gets_the_columns_it_names_as_plain_values():
    seen = {}

    def some(prompts, completions, level, ids, other=None):
        seen.update(level=level, ids=ids, other=other)
        return level

    reward = FunctionReward(some)
    assert reward.reads == ("level", "ids", "other?")
    assert reward(PROMPTS, RESPONSES, COLUMNS) == [1.0, 2.0, 3.0]
    assert seen == {"level": [1, 2, 3], "ids": [[1], [2, 3], []], "other": None}
    assert all(type(value) is int for value in seen["level"])

    @per_row
    def everything(prompt, response, **columns):
        return len(columns)

    assert FunctionReward(everything).reads is None
    assert FunctionReward(everything)(PROMPTS, RESPONSES, COLUMNS | {"prompt": PROMPTS}) == [3.0] * 3


@pytest.mark.parametrize(
    "answer",
    [
        *([True, False, 1], (1, 0, 1.0), np.array([1, 0, 1]), torch.tensor([1.0, 0.0, 1.0])),
        [torch.tensor(1.0), np.float32(0), np.int64(1)],
    ],
)
def test_numbers_of_every_kind(answer):
    assert FunctionReward(lambda prompts, completions: answer)(PROMPTS, RESPONSES) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0, 0.0], r"returned 2 rewards for 3 rows \(70\.\.72\)"),
        ([1.0] * 4, "returned 4 rewards for 3 rows"),
        (None, "returned None .* for 3 rows"),
        (1.0, "it must return a list of 3 numbers. .* once per row .* rewards.per_row"),
        ("abc", "it must return a list of 3 numbers"),
        ({"a": 1}, "it must return a list of 3 numbers"),
        (torch.tensor(1.0), "it must return a list of 3 numbers"),
        ([1.0, None, 1.0], "returned None .* at row 71"),
        ([1.0, 0.0, math.nan], "returned nan at row 72"),
        ([math.inf, 0.0, 0.0], "returned inf at row 70"),
        (["1", 0.0, 0.0], "returned '1' .* at row 70"),
        ([[1.0], 0.0, 0.0], r"returned \[1.0\] .* at row 70.* or with level='token' a list"),
        (torch.ones(3, 2), "at row 70"),
        ([1j, 0.0, 0.0], "at row 70"),
    ],
)
def test_bad_answers_name_the_function_and_the_row(answer, message):
    def my_reward(prompts, completions):
        return answer

    with pytest.raises(RewardError, match=f"(?s)my_reward returned .*{message.removeprefix('returned ')}"):
        FunctionReward(my_reward)(PROMPTS, RESPONSES, row_ids=torch.tensor([70, 71, 72]))


def test_an_exception_is_passed_on_with_its_place():
    @per_row
    def broken(prompt, response):
        return 1.0 / (len(response) - 2) if prompt == "1+2=" else 0.0

    with pytest.raises(RewardError, match="broken raised ZeroDivisionError at row 8") as caught:
        FunctionReward(broken)(PROMPTS, ["2", "42", "4"], row_ids=[7, 8, 9])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def broken_for_all(prompts, completions):
        raise KeyError("x")

    with pytest.raises(RewardError, match=r"broken_for_all raised KeyError for rows 0\.\.2"):
        FunctionReward(broken_for_all)(PROMPTS, RESPONSES)


CHAT = [{"role": "user", "content": "1+1="}]
IDS = Ragged.from_rows([[5], [6, 7], [8]])


def test_trl_functions_are_called_by_keyword_in_any_order():
    def scores(completions, answer, prompts, completion_ids, *, level=0, missing="none"):
        assert (prompts, level, missing) == (PROMPTS, [1, 2, 3], "none")
        assert completion_ids == [[5], [6, 7], [8]]
        return [float(c == a) for c, a in zip(completions, answer)]

    reward = FunctionReward(scores)
    assert reward.reads == ("answer", "response_ids", "level?", "missing?")
    assert reward(PROMPTS, RESPONSES, COLUMNS | {"response_ids": IDS}) == [1.0, 0.0, 1.0]
    with pytest.raises(RewardError, match=r"scores needs the column 'response_ids'; there are \['answer', "):
        reward(PROMPTS, RESPONSES, COLUMNS)

    assert FunctionReward(lambda completions: [len(c) for c in completions])(PROMPTS, ["a", "", "abc"]) == [1, 0, 3]
    optional = FunctionReward(lambda completions, completion_ids=None: [0.0 if completion_ids is None else 1.0] * 3)
    assert optional.reads == ("response_ids?",)
    assert optional(PROMPTS, RESPONSES) == [0.0] * 3
    assert optional(PROMPTS, RESPONSES, {"response_ids": IDS}) == [1.0] * 3


def test_chat_prompts_have_chat_completions_as_in_trl():
    def format_reward(prompts, completions, **kwargs):
        assert prompts == [CHAT, "1+2="]
        assert completions[1] == "3"
        return [float(completions[0] == [{"role": "assistant", "content": "2"}]), 1.0]

    assert FunctionReward(format_reward)([CHAT, "1+2="], ["2", "3"]) == [1.0, 1.0]
    assert FunctionReward(lambda **kwargs: [float(kwargs["completions"][0][0]["content"])])([CHAT], ["2"]) == [2.0]
    assert FunctionReward(per_row(lambda prompt, response: float(response == "2")))([CHAT], ["2"]) == [1.0]


def test_async_functions_of_every_convention():
    async def trl(completions, answer):
        await asyncio.sleep(0.001)
        return [float(c == a) for c, a in zip(completions, answer)]

    for function in (trl, functools.partial(trl)):
        assert FunctionReward(function)(PROMPTS, RESPONSES, COLUMNS) == [1.0, 0.0, 1.0]

    running, most = 0, 0

    @per_row
    async def row(prompt, response, answer):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        if prompt == "2+2=" and answer == "bad":
            raise LookupError("no such row")
        return float(response == answer)

    assert FunctionReward(row)(PROMPTS, RESPONSES, COLUMNS) == [1.0, 0.0, 1.0]
    assert most == 3, "rows of an async function run at the same time"
    with pytest.raises(RewardError, match=r"row raised LookupError at row 2: no such row") as caught:
        FunctionReward(row)(PROMPTS, RESPONSES, {"answer": ["2", "3", "bad"]})
    assert isinstance(caught.value.__cause__, LookupError)


def test_async_functions_inside_a_running_event_loop():
    async def scores(completions):
        return [1.0] * len(completions)

    async def notebook():
        return FunctionReward(scores)(PROMPTS, RESPONSES)

    assert asyncio.run(notebook()) == [1.0] * 3


def test_messages_say_where_the_function_is_and_which_column():
    with pytest.raises(RewardError, match=r"row 0.*\[column 'costs', <lambda> at .*test_reward_function.py:\d+\]"):
        FunctionReward(per_row(lambda prompt, response: None), column="costs")(PROMPTS, RESPONSES)
    with pytest.raises(RewardError, match=r"Bad returned nan at row 0.*Bad at .*test_reward_function.py:\d+\]"):
        FunctionReward(per_row(functools.partial(Bad(), score=math.nan)))(PROMPTS, RESPONSES)
    for number in (1e39, 10**400, -(10**5000)):
        with pytest.raises(RewardError, match=r"returned .* at row 0; it does not fit float32"):
            FunctionReward(per_row(lambda prompt, response, number=number: number))(PROMPTS, RESPONSES)


class Bad:
    def __call__(self, prompt, response, score):
        return score


class Verifier:
    def __init__(self, reads):
        self.reads = reads

    def __call__(self, prompts, completions, **columns):
        return [float(list(columns) == [name.removesuffix("?") for name in self.reads])] * len(prompts)


def test_verifiers_say_what_they_read():
    assert FunctionReward(Verifier(("answer",))).reads == ("answer",)
    assert FunctionReward(Verifier(["answer", "level?"])).reads == ("answer", "level?")
    assert FunctionReward(Verifier(("answer", "level?")))(PROMPTS, RESPONSES, COLUMNS) == [1.0] * 3
    assert FunctionReward(Verifier(()))(PROMPTS, RESPONSES, COLUMNS) == [1.0] * 3
    with pytest.raises(ConfigError, match="must be a tuple of column names"):
        FunctionReward(Verifier("answer"))

    def fixed(prompts, completions, answer):
        return [0.0]

    fixed.reads = ("tests",)
    with pytest.raises(ConfigError, match="reads the column 'tests' and does not take it"):
        FunctionReward(fixed)


def test_a_tensor_of_rewards_per_token():
    everything = FunctionReward(lambda completions, ids: torch.ones(3, 1), level="token")
    assert everything(PROMPTS, RESPONSES, COLUMNS | {"response_ids": IDS.slice(0, 1).index([0, 0, 0])}) == [[1.0]] * 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], r"returned 1 rewards at row 1, whose response has 2 tokens"),
        (1.0, r"returned 1\.0 \(float\) at row 1; at level='token' it must return a list of 2 numbers"),
        ("ab", r"at level='token' it must return a list of 2 numbers"),
        ([1.0, math.nan], r"returned nan at row 1, token 1"),
        ([None, 1.0], r"returned None .* at row 1, token 0"),
        ([[1.0], [2.0]], r"returned \[1\.0\] .* at row 1, token 0"),
    ],
)
def test_wrong_rewards_per_token(answer, message):
    @per_row
    def my_reward(prompt, response, response_ids):
        return answer if len(response_ids) == 2 else [0.0] * len(response_ids)

    with pytest.raises(RewardError, match=f"my_reward {message}|{message}"):
        FunctionReward(my_reward, level="token")(PROMPTS, RESPONSES, {"response_ids": IDS})


SOURCES = {"data_source": ["sums"] * 3, "ground_truth": ["2", "3", "4"], "extra_info": [{"index": i} for i in range(3)]}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums"
    right = float(solution_str == ground_truth)
    return {"score": right, "acc": bool(right), "index": extra_info["index"], "pred": solution_str}


def test_compute_score_of_verl():
    reward = FunctionReward(from_compute_score(compute_score, components=("acc", "index")))
    assert reward.name == "compute_score"
    assert reward.reads == ("data_source", "ground_truth", "extra_info?")
    assert reward(PROMPTS, RESPONSES, SOURCES) == [1.0, 0.0, 1.0]
    found = Functions(reward.function)(PROMPTS, RESPONSES, SOURCES).components
    columns = {name: column.tolist() for name, column in found.items()}
    assert columns == {"rewards/acc": [1.0, 0.0, 1.0], "rewards/index": [0.0, 1.0, 2.0]}

    async def score(data_source, solution_str, ground_truth, **kwargs):
        assert (data_source, kwargs) == (None, {})
        return solution_str == ground_truth

    nested = from_compute_score(score, data_source=None, ground_truth="reward_model.ground_truth")
    assert FunctionReward(nested).reads == ("reward_model", "extra_info?")
    columns = {"reward_model": [{"style": "rule", "ground_truth": text} for text in "234"]}
    assert FunctionReward(nested)(PROMPTS, RESPONSES, columns) == [1.0, 0.0, 1.0]


def test_wrong_answers_of_compute_score():
    def answering(answer):
        return FunctionReward(from_compute_score(lambda data_source, solution_str, ground_truth: answer))

    assert answering({"score": 0.5})(PROMPTS, RESPONSES, SOURCES) == [0.5] * 3
    for answer, message in (
        ({"acc": 1.0}, "must have the entry 'score'"),
        ({"score": None}, "returned None .* at row 0; it must be a number"),
        ("1.0", "returned '1.0' .* at row 0"),
    ):
        with pytest.raises(RewardError, match=message):
            answering(answer)(PROMPTS, RESPONSES, SOURCES)
    odd = from_compute_score(lambda **kwargs: {"score": 1.0, "acc": "yes"}, components=("acc",))
    with pytest.raises(RewardError, match=r"returned 'yes' \(str\) as 'acc' at row 0"):
        FunctionReward(odd)(PROMPTS, RESPONSES, SOURCES)
    with pytest.raises(ConfigError, match="has no parameter 'data_source'"):
        from_compute_score(lambda solution_str, ground_truth: 1.0)
    with pytest.raises(RewardError, match=r"returned \{'score': 1.0\}"):
        FunctionReward(per_row(lambda prompt, response: {"score": 1.0}))(PROMPTS, RESPONSES)


PROMPTS, RESPONSES = ["1+1=", "1+2=", "2+2="], ["2", "4", "4"]
ANSWERED = {"answer": ["2", "3", "4"], "response_ids": IDS}
RIGHT = [1.0, 0.0, 1.0]


def equal(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


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
    found = functions(PROMPTS, RESPONSES, ANSWERED).components
    assert [column.tolist() for column in found.values()] == [RIGHT] * 5
    functions.close()


@pytest.mark.parametrize(
    "function",
    [
        lambda prompts, answer: [1.0] * 3,
        lambda texts, responses: [1.0] * 3,
        lambda texts, /, **columns: [1.0] * 3,
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
        "own": Ragged.from_rows([[1], [2, 3], []]),
        "log_probs": Ragged.from_rows([[0.1], [0.2, 0.3], [0.4]]),
        "rewards/format": torch.ones(3),
        "row_id": torch.arange(3),
        "prompt": PROMPTS,
        "response": RESPONSES,
    }
    seen = {}

    def everything(completions, row_id, **kwargs):
        seen.update(kwargs, row_id=row_id)
        return [0.0] * 3

    reward = FunctionReward(everything)
    assert reward.reads is None
    reward(PROMPTS, RESPONSES, ANSWERED | written)
    assert seen["completion_ids"] == IDS.tolist()
    assert sorted(seen) == ["answer", "completion_ids", "own", "prompts", "rewards/format", "row_id"]
    assert seen["own"] == [[1], [2, 3], []]
    assert seen["row_id"] == [0, 1, 2]

    @per_row
    def row(prompt, response, **columns):
        assert set(columns) == {"answer", "own", "rewards/format", "row_id"}
        return 1.0

    assert FunctionReward(row)(PROMPTS, RESPONSES, ANSWERED | written) == [1.0] * 3


def test_there_is_no_state_of_a_trainer():
    with pytest.raises(ConfigError, match=r"'trainer_state': there is no trainer .* default"):
        Functions(lambda completions, trainer_state, **kwargs: [0.0])

    def optional(completions, trainer_state=None):
        return [float(trainer_state is None)] * 3

    assert FunctionReward(optional).reads == ()
    assert FunctionReward(optional)(PROMPTS, RESPONSES, ANSWERED | {"trainer_state": [1, 2, 3]}) == [1.0] * 3


def test_verifiers_that_take_everything_by_name():
    class Verifier:
        reads = ("answer",)

        def __call__(self, **columns):
            assert sorted(columns) == ["answer", "completion_ids", "completions", "prompts"]
            return equal(columns["completions"], columns["answer"])

    assert FunctionReward(Verifier()).reads == ("answer", "response_ids?")
    assert FunctionReward(Verifier())(PROMPTS, RESPONSES, ANSWERED | {"level": [1, 2, 3]}) == RIGHT


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
    with pytest.raises(RewardError, match=rf"{function.__name__} at row 1: .* no entry 'ground_truth'; {message}\."):
        Functions(adapted)(PROMPTS, RESPONSES, columns)
    scores = Functions(adapted, on_failure="zero")(PROMPTS, RESPONSES, columns)
    assert [failure is None for failure in scores.failures] == [True, False, True]
