"""Several reward functions: weights, columns, rows that fail, and child processes with limits."""

from __future__ import annotations

import asyncio
import functools
import math
import pickle
import signal
import threading
import time
from contextlib import nullcontext, suppress

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch.ragged import Ragged
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards import Functions, Overlong, RowFailure, from_compute_score, per_row, whole_batch
from hybridflow.rewards import functions as reward_functions
from hybridflow.rewards.function_adapters import name_of
from hybridflow.rewards.functions import CallLimit, weighted_sum
from tests import example_rewards as examples
from tests.example_rewards import (
    blocks_on_three,
    broken_at_three,
    correct,
    hangs_on_three,
    kills_the_template_on_three_of_all,
    only_sums_to_four,
)

short, unjudged, dies_on_three = per_row(examples.short), per_row(examples.unjudged), per_row(examples.dies_on_three)
waits_on_three, freezes_on_three = per_row(examples.waits_on_three), per_row(examples.freezes_on_three)
kills_the_template_on_three = per_row(examples.kills_the_template_on_three)
rank, count, fails, sleeps = map(whole_batch, (examples.rank, examples.count, examples.fails, examples.sleeps))
PROMPTS, RESPONSES = ["1+1=", "1+2=", "2+2=", "3+3="], ["2", "4", "4", "6"]
ANSWERS = {"answer": ["2", "3", "4", "6"]}
ROWS = [70, 71, 72, 73]


def test_one_function_is_its_own_reward():
    scores = Functions(correct)(PROMPTS, RESPONSES, ANSWERS, ROWS)
    assert scores.rewards.dtype == torch.float32
    assert scores.rewards.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert scores.components == {}
    assert scores.failures == [None] * 4
    assert Functions(correct, weights=[2])(PROMPTS, RESPONSES, ANSWERS).rewards.tolist() == [2.0, 0.0, 2.0, 2.0]


def test_several_functions_are_added_with_their_weights():
    several = Functions([correct, short, only_sums_to_four], weights=[1, 0.5, 10])
    assert several.writes == ("rewards/correct", "rewards/short", "rewards/only_sums_to_four")
    assert several.reads is None
    scores = several(PROMPTS, RESPONSES, ANSWERS, ROWS)
    assert scores.rewards.tolist() == [1.5, 5.5, 6.5, 1.5]
    assert list(scores.components) == list(several.writes)
    assert scores.components["rewards/short"].tolist() == [1.0] * 4
    only = scores.components["rewards/only_sums_to_four"]
    assert only.dtype == torch.float32
    assert only.isnan().tolist() == [True, False, False, True]


def test_columns_are_named_after_functions():
    class ExactMatch:
        def __call__(self, prompts, completions):
            return [1.0] * len(prompts)

    functions = [ExactMatch(), short, short, per_row(lambda prompt, response: 1.0)]
    names = ("exact_match", "short", "short_2", "function")
    assert Functions(functions).writes == tuple(f"rewards/{name}" for name in names)
    named = Functions({"brief": short, "right": correct}, weights={"right": 2}, column="costs")
    assert named.writes == ("costs/brief", "costs/right")
    assert named.reads == ("answer",)
    assert named(PROMPTS, RESPONSES, ANSWERS).rewards.tolist() == [3.0, 1.0, 3.0, 3.0]


def test_what_is_needed_by_one_is_read():
    @per_row
    def optional(prompt, response, answer="", level=0):
        return 0.0

    assert Functions([optional, correct]).reads == ("level?", "answer")
    assert Functions([optional, Overlong(8, 4)]).reads == ("answer?", "level?", "response_ids")


def test_none_from_all_functions_is_refused():
    with pytest.raises(RewardError, match=r"only_sums_to_four returned None \(NoneType\) at row 70; .*'rewards'"):
        Functions(only_sums_to_four)(PROMPTS, RESPONSES, ANSWERS, ROWS)
    with pytest.raises(RewardError, match=r"all reward functions \(a, b\) returned None at row 70"):
        Functions({"a": only_sums_to_four, "b": only_sums_to_four})(PROMPTS, RESPONSES, ANSWERS, ROWS)


@given(st.data())
def test_weighted_sum_is_the_sum_over_those_that_apply(data):
    count = data.draw(st.integers(1, 5))
    tokens = data.draw(st.none() | st.integers(0, 4))
    number = st.floats(-1e3, 1e3)
    value = number if tokens is None else st.lists(number, min_size=tokens, max_size=tokens)
    values = data.draw(st.lists(st.none() | value, min_size=count, max_size=count))
    weights = data.draw(st.lists(number, min_size=count, max_size=count))
    found = weighted_sum(values, weights)
    if all(value is None for value in values):
        assert found is None
    else:
        none = np.zeros(() if tokens is None else tokens)
        table = np.array([none if value is None else value for value in values], float)
        assert np.allclose(found, np.tensordot(np.array(weights), table, 1), atol=1e-6)


@pytest.mark.parametrize("function", [broken_at_three, unjudged])
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_fail_follow_the_setting(function, workers):
    for setting in ("zero", "mask"):
        both = Functions([function, short], workers=workers, on_failure=setting)
        scores = both(PROMPTS, RESPONSES, ANSWERS, ROWS)
        assert scores.rewards.tolist() == [2.0, 0.0, 2.0, 2.0]
        reason = "raised LookupError: no three" if function is broken_at_three else "was not judged: too odd"
        assert scores.failures[1].startswith(f"{name_of(function)}: {reason}")
        assert scores.failures[0] is scores.failures[2] is scores.failures[3] is None
        assert scores.components[f"rewards/{name_of(function)}"].isnan().tolist() == [False, True, False, False]
        assert scores.components["rewards/short"].tolist() == [1.0] * 4
        both.close()
    strict = Functions([function, short], workers=workers)
    rows = "rows 70..73" if workers == 0 and function is broken_at_three else "row 71"
    with pytest.raises(RewardError, match=rf"{name_of(function)} .*{rows}: .*'zero'.*example_rewards.py:\d+\]"):
        strict(PROMPTS, RESPONSES, ANSWERS, ROWS)
    strict.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("answer", [[1.0], [None] * 4, [math.nan] * 4, ["1"] * 4, [[1.0]] * 4, 1.0])
def test_wrong_answers_are_errors_whatever_the_setting(answer, workers):
    wrong = Functions(lambda prompts, completions: answer, on_failure="zero", workers=workers)
    with pytest.raises(RewardError, match=r"<lambda> returned .*\[column 'rewards', <lambda> at .*\.py:\d+\]"):
        wrong(PROMPTS, RESPONSES, {}, ROWS)
    wrong.close()


@pytest.mark.parametrize("function", [hangs_on_three, dies_on_three, waits_on_three, blocks_on_three, freezes_on_three])
def test_limits_hold_for_every_convention_and_only_guilty_rows_fail(function):
    reason = "exited with code 9" if function is dies_on_three else "took longer than 1 s"
    limited = Functions(function, timeout=1, on_failure="mask")
    assert limited.workers == 1, "where nothing can be stopped there is no limit"
    scores = limited(PROMPTS, RESPONSES, ANSWERS, ROWS)
    assert scores.rewards.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert scores.failures == [None, f"{name_of(function)}: {reason}", None, None]
    limited.close()


@pytest.mark.parametrize("on_failure", ["raise", "zero"])
def test_a_function_that_hangs_is_not_called_for_every_row_before_the_error(tmp_path, on_failure):
    log = tmp_path / "calls"

    def hangs_always(prompts, completions):
        with open(log, "a") as file:
            file.write("called\n")
        time.sleep(60)

    hanging = Functions(hangs_always, workers=1, timeout=0.3, on_failure=on_failure)
    late = pytest.raises(RewardError, match=r"longer than 0\.3 s at row 0")
    with late if on_failure == "raise" else nullcontext():
        assert hanging(PROMPTS * 2, RESPONSES * 2, {}).rewards.tolist() == [0.0] * 8
    hanging.close()
    assert log.read_text().count("called") == (2 if on_failure == "raise" else 9)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_raises_an_interrupt_fails_alone(workers):
    @per_row
    def interrupts(prompt, response, answer):
        if answer == "3":
            raise KeyboardInterrupt
        return 1.0

    both = Functions(interrupts, workers=workers, on_failure="zero")
    scores = both(PROMPTS, RESPONSES, ANSWERS)
    assert scores.rewards.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert scores.failures[1].startswith("interrupts: raised KeyboardInterrupt (")
    both.close()


def test_an_interrupt_by_the_user_ends_the_call():
    def interrupted(prompts, completions):
        signal.raise_signal(signal.SIGINT)
        time.sleep(60)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Functions(interrupted, on_failure="zero")(PROMPTS, RESPONSES, {})
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def hangs(prompts, completions):
    while True:
        with suppress(Exception):
            time.sleep(60)


@per_row
def hangs_row_by_row(prompt, response, answer):
    return hangs([prompt], [response]) if answer == "3" else 1.0


@per_row
async def waits_async(prompt, response, answer):
    await asyncio.sleep(3600 if answer == "3" else 0)
    return 1.0


@pytest.mark.parametrize(("hanging", "others"), [(hangs, 0.0), (hangs_row_by_row, 1.0), (waits_async, 1.0)])
def test_calls_in_this_process_have_a_limit_without_a_timeout(hanging, others, monkeypatch):
    monkeypatch.setattr(reward_functions, "PATIENCE", 0.5)
    handler = signal.getsignal(signal.SIGVTALRM)
    scores = Functions(hanging, on_failure="zero")(PROMPTS, RESPONSES, ANSWERS, ROWS)
    assert scores.rewards.tolist() == [others, 0.0, others, others]
    assert "took longer than" in str(scores.failures[1])
    with pytest.raises(RewardError, match=f"{name_of(hanging)} took longer than"):
        Functions(hanging)(PROMPTS, RESPONSES, ANSWERS, ROWS)
    assert signal.getsignal(signal.SIGVTALRM) == handler


def test_a_limit_inside_another_one_leaves_that_in_force():
    def inner(prompts, completions):
        return Functions(lambda prompts, completions: time.sleep(60))(prompts, completions, {}).rewards

    with CallLimit() as limit:
        late = limit.run(lambda: inner(PROMPTS, RESPONSES), 0.5)
    assert "took longer than 0.5 s" in late.reason


def test_an_event_loop_that_blocks_has_a_limit(monkeypatch):
    @per_row
    async def blocks(prompt, response, answer):
        return hangs([prompt], [response])

    monkeypatch.setattr(reward_functions, "PATIENCE", 0.5)
    monkeypatch.setattr(reward_functions, "GRACE", 0.5)
    with pytest.raises(RewardError, match="blocks took longer than 1 s"):
        Functions(blocks)(PROMPTS, RESPONSES, ANSWERS, ROWS)


def test_children_and_this_process_agree():
    @per_row
    async def rows(prompt, response, answer):
        return float(prompt < answer)

    def scored(data_source, solution_str, ground_truth):
        return {"score": len(solution_str), "half": 0.5 if ground_truth == "3" else None}

    adapted = from_compute_score(scored, data_source=None, ground_truth="answer", components=("half",))
    functions = [correct, short, rows, only_sums_to_four, adapted, Overlong(4, 2)]
    columns = {"answer": ANSWERS["answer"] * 5, "response_ids": Ragged.from_lengths(torch.arange(50), [1, 2, 3, 4] * 5)}
    here = Functions(functions)(PROMPTS * 5, RESPONSES * 5, columns)
    there = Functions(functions, workers=3)
    assert there.writes[-2:] == ("rewards/overlong", "rewards/half")
    for _ in range(2):
        scores = there(PROMPTS * 5, RESPONSES * 5, columns)
        assert torch.equal(scores.rewards, here.rewards)
        for name, column in here.components.items():
            assert torch.equal(scores.components[name].nan_to_num(-9), column.nan_to_num(-9))
    there.close()
    assert here.components["rewards/half"].isnan().tolist() == [True, False, True, True] * 5
    assert here.components["rewards/overlong"].tolist() == [0.0, 0.0, -0.5, -1.0] * 5
    assert set(here.components) == set(there.writes)


def test_rewards_per_token():
    ids = Ragged.from_rows([[1], [2, 3], [], [4, 5, 6]])

    @per_row
    def ones(prompt, response, response_ids):
        return RowFailure("was not judged") if len(response_ids) == 3 else [1.0] * len(response_ids)

    def none_for_short(prompts, completions, completion_ids):
        return [None if len(row) < 2 else list(range(len(row))) for row in completion_ids]

    for workers in (0, 2):
        both = Functions([ones, none_for_short], weights=[1, 2], level="token", on_failure="zero", workers=workers)
        assert both.reads == ("response_ids",)
        scores = both(PROMPTS, RESPONSES, {}, ROWS, ids)
        assert isinstance(scores.rewards, Ragged)
        assert scores.rewards.dtype == torch.float32
        assert scores.rewards.tolist() == [[1.0], [1.0, 3.0], [], [0.0, 0.0, 0.0]]
        assert scores.components["rewards/none_for_short"].nan_to_num(-1).tolist() == [-1.0, 1.0, -1.0, 3.0]
        assert scores.failures[3] == "ones: was not judged"
        both.close()


@pytest.mark.parametrize("reason", [ValueError("why"), None, 3, "answered with what cannot be sent back"], ids=repr)
def test_a_function_may_fail_all_rows_for_any_reason(reason):
    def never(prompts, completions, **kwargs):
        return RowFailure(reason)

    scores = Functions(never, on_failure="zero")(PROMPTS, RESPONSES, {})
    assert scores.rewards.tolist() == [0.0] * len(PROMPTS)
    assert all(f"never: {reason}" in str(one) for one in scores.failures)


def test_no_rows_call_nothing():
    scores = Functions([correct, dies_on_three], workers=2)([], [], {"answer": []})
    assert scores.rewards.shape == (0,)
    assert scores.components["rewards/correct"].shape == (0,)
    assert len(Functions(correct, level="token")([], [], {"answer": [], "response_ids": []}).rewards) == 0


def test_constructing_starts_nothing_and_copies_work():
    threads = threading.active_count()
    made = Functions([correct, short], workers=2, timeout=10)
    made.check()
    for dumps in (cloudpickle.dumps, pickle.dumps):
        copy = pickle.loads(dumps(made))
        assert copy(PROMPTS, RESPONSES, ANSWERS).rewards.tolist() == [2.0, 1.0, 2.0, 2.0]
        copy.close()
    assert threading.active_count() == threads


LOCK = threading.Lock()


def test_functions_that_cannot_travel_are_refused_before_anything_starts():
    lock = LOCK

    @per_row
    def locked(prompt, response):
        with lock:
            return 1.0

    Functions(locked).check()
    for use in (Functions.check, lambda functions: functions(PROMPTS, RESPONSES, {})):
        with pytest.raises(ConfigError, match=r"locked cannot be sent to a worker process \(TypeError.*workers=0"):
            use(Functions(locked, workers=1))


@pytest.mark.parametrize(
    ("functions", "settings", "message"),
    [
        ([], {}, "no reward function in the list"),
        (correct, {"level": "tokens"}, "level='tokens' must be one of 'sample', 'token'"),
        (correct, {"on_failure": "ignore"}, "on_failure='ignore'"),
        (correct, {"workers": -1}, "workers=-1 .* or 0 for none"),
        (correct, {"workers": 1.0}, r"workers=1\.0"),
        (correct, {"timeout": 0}, "timeout=0"),
        (correct, {"timeout": "5"}, "timeout='5'"),
        ([correct, short], {"weights": [1]}, r"weights=\[1\]: give one per reward function \(correct, short\)"),
        ([correct, short], {"weights": [1, math.nan]}, "nan is not a finite number"),
        ([correct, short], {"weights": {"corect": 2}}, "Did you mean 'correct'"),
        (correct, {"weights": [10**400]}, "1000"),
        (correct, {"timeout": 10**400}, "1000"),
        ({"": correct}, {}, "not empty"),
        ("exact match", {}, "has no signature"),
        ([from_compute_score(lambda **k: 0, components=("f",))] * 2, {}, "'rewards/f' would be written twice"),
    ],
)
def test_settings_are_checked_at_once(functions, settings, message):
    with pytest.raises(ConfigError, match=message):
        Functions(functions, **settings)


def test_overlong():
    with pytest.raises(ConfigError, match=r"max_tokens=8, cache=9"):
        Overlong(8, 9)


def test_closing_closes_verifiers_through_partials():
    closed = []

    class Verifier:
        def __init__(self, name):
            self.name = name

        def __call__(self, prompts, completions, **columns):
            return [1.0] * len(prompts)

        def close(self):
            closed.append(self.name)
            if self.name == "bad":
                raise OSError("not today")

    shared = Verifier("shared")
    functions = [Verifier("bad"), shared, functools.partial(shared), functools.partial(Verifier("inside")), short]
    made = Functions(functions)
    made.close()
    assert closed == ["bad", "shared", "inside"]


def test_failures_that_a_verifier_states_read_well():
    @per_row
    def unable(prompt, response, answer):
        return RowFailure("the reference in column 'answer' is {'a': 1}") if answer == "3" else 1.0

    with pytest.raises(RewardError, match=r"function unable at row 71: the reference .*\. Mend the row, or") as caught:
        Functions(unable)(PROMPTS, RESPONSES, ANSWERS, ROWS)
    assert "Fix the function" not in str(caught.value)


@pytest.mark.parametrize("function", [kills_the_template_on_three, kills_the_template_on_three_of_all])
def test_a_row_that_kills_the_template_process_costs_no_batch(function):
    doomed = Functions(function, workers=1, on_failure="mask")
    for _ in range(2):
        scores = doomed(PROMPTS, RESPONSES, ANSWERS, ROWS)
        assert scores.rewards.tolist() == [1.0, 0.0, 1.0, 1.0]
        assert scores.failures[1].startswith(f"{name_of(function)}: ended when something killed the template process")
        assert [failure is None for failure in scores.failures] == [True, False, True, True]
    with pytest.raises(RewardError, match=rf"reward functions {name_of(function)}: .* was started anew 3 times"):
        doomed(PROMPTS * 2, RESPONSES * 2, {"answer": ["3"] * 8})
    assert doomed(PROMPTS, RESPONSES, {"answer": ["2"] * 4}).rewards.tolist() == [1.0] * 4
    doomed.close()


def test_what_no_child_can_answer_is_a_wrong_answer():
    wrong = Functions(lambda prompts, completions: [1j] * len(prompts), workers=1, on_failure="zero")
    with pytest.raises(RewardError, match=r"<lambda> answered with what cannot be sent back: .* complex .* row 70"):
        wrong(PROMPTS, RESPONSES, {}, ROWS)
    wrong.close()
    numbers = Functions(lambda prompts, completions: np.arange(4.0), workers=1)
    assert numbers(PROMPTS, RESPONSES, {}).rewards.tolist() == [0.0, 1.0, 2.0, 3.0]
    numbers.close()


WHOLE = (["p"] * 6, ["a", "abc", "ab", "x", "xyz", "xy"], {"group_id": [4, 4, 4, 9, 9, 9]})


@pytest.mark.parametrize("workers", [0, 3])
def test_a_function_of_all_rows_gets_them_in_one_call(workers):
    judge = Functions([rank, count], workers=workers)
    scores = judge(*WHOLE)
    judge.close()
    assert scores.components["rewards/rank"].tolist() == [2, 0, 1, 2, 0, 1]
    assert scores.components["rewards/count"].tolist() == [6] * 6


def test_with_a_column_of_names_a_function_gets_the_rows_of_its_name():
    judge = Functions({"math": count, "code": rank}, by="source")
    columns = {"group_id": [4, 4, 4, 9, 9, 9], "source": ["math", "math", "code", "code", "math", "math"]}
    assert judge(WHOLE[0], WHOLE[1], columns).rewards.tolist() == [4, 4, 0, 0, 4, 4]


@pytest.mark.parametrize(("function", "says"), [(fails, "of 6 rows"), (sleeps, "0.2 s")])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_call_that_fails_fails_for_all_rows(function, says, workers):
    limit = 0.2 if function is sleeps else 20.0
    judge = Functions(function, workers=workers, timeout=limit, on_failure="zero")
    scores = judge(*WHOLE)
    judge.close()
    assert scores.rewards.tolist() == [0.0] * 6
    assert all(failure is not None and says in failure for failure in scores.failures)
    judge = Functions(function, workers=workers, timeout=limit)
    with pytest.raises(RewardError, match=r"for rows 0\.\.5"):
        judge(*WHOLE)
    judge.close()


def test_what_a_function_of_all_rows_returns_is_checked():
    with pytest.raises(RewardError, match="returned 1 rewards for 6 rows"):
        Functions(whole_batch(lambda completions: [1.0]))(*WHOLE)


def test_other_signatures_than_of_all_rows_are_refused():
    with pytest.raises(ConfigError, match="give the function itself"):
        whole_batch(per_row(lambda prompt, response: 1.0))
    with pytest.raises(ConfigError, match=r"must take \(prompts, completions"):
        whole_batch(lambda prompt, response: 1.0)
