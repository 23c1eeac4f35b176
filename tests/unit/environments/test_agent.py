"""What is refused on the driver before a call with an agent, and which row of the engine continues which."""

import json
import pickle
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybridflow.batch.batch import Batch
from hybridflow.config import Sampling, Until
from hybridflow.engines.contract import Row
from hybridflow.environments.agent import ActingSession, Agent, report_failures
from hybridflow.environments.sessions import Sessions
from hybridflow.environments.trajectory import Trajectory
from hybridflow.errors import ConfigError, RewardError
from tests.example_templates import byte_tokenizer

COLUMNS = ("row_id", "prompt")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def unhinted(a):
    """A number."""


def undescribed(a: int) -> int:
    """A number."""
    return a


class Shop:
    def reset(self) -> str:
        return "Buy."

    def buy(self, name) -> str:
        """Buy something."""
        return name

    def get_reward(self) -> float:
        return 0.0


def test_a_template_without_tools_is_refused(tmp_path):
    byte_tokenizer("plain").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no place for tools"):
        Agent(tools=[add]).check(str(tmp_path), COLUMNS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": [unhinted]}, "the tool unhinted cannot be described"),
        ({"tools": [undescribed]}, "the tool undescribed cannot be described"),
        ({"tools": [3]}, "which is no function"),
        ({"tools": [add, add]}, "two tools named add"),
        ({"environment": Shop}, "the tool buy cannot be described"),
    ],
)
def test_tools_that_cannot_be_described_are_refused(checkpoint, settings, message):
    with pytest.raises(ConfigError, match=message):
        Agent(**settings).check(checkpoint, COLUMNS)


WRONG = {"max_turns": [0, -1, 2.0, True, None], "max_failed": [1.5, -0.1, "half", True]}


@pytest.mark.parametrize(("setting", "wrong"), [(name, one) for name, several in WRONG.items() for one in several])
def test_settings_out_of_range_are_refused(setting, wrong):
    with pytest.raises(ConfigError, match=f"{setting}="):
        Agent(tools=[add], **{setting: wrong})


@pytest.mark.parametrize("seconds", [1, 0.5, np.float64(30.0), float("inf")])
def test_seconds_are_any_number_above_zero(seconds):
    assert Agent(tools=[add], timeout=seconds).timeout == seconds
    for refused in (0, -seconds, True, "30", None):
        with pytest.raises(ConfigError, match="timeout="):
            Agent(tools=[add], timeout=refused)


class Scripted:
    """In the place of the processes: the newest one says what it is given, or ends where that is a text."""

    ready, retiring = True, False

    def __init__(self) -> None:
        self.says: list[Any] = []
        self.told: list[tuple[Any, ...]] = []
        self.workers = [self]

    def allow(self, *_) -> None: ...

    def send(self, message: bytes) -> None:
        self.told.append(pickle.loads(message))

    def poll(self, seconds: float) -> list[Any]:
        found, self.says = self.says, []
        worker = self.workers[-1]
        return [(worker, one if isinstance(one, str) else json.dumps(one).encode()) for one in found]

    def fork(self) -> "Scripted":
        self.workers.append(worker := Scripted())
        return worker

    def end(self, worker: "Scripted") -> str:
        self.workers.remove(worker)
        return "was ended"


def test_a_turn_continues_the_row_that_has_its_tokens():
    processes, given = Scripted(), SimpleNamespace(seconds=1.0)
    turns = Sessions(lambda: (given, None, processes), count())  # type: ignore[arg-type]
    turns.start([Row(5, index, [], Sampling(), index) for index in range(2)], [{}, {}])
    numbers = iter(range(100))

    def asked(*turns_of: tuple[int, list[int]]):
        processes.says = [["turn", key, next(numbers), ids, {}, []] for key, ids in turns_of]
        rows = turns.poll(0.0)
        assert rows is not None
        return rows

    def said(row, *ids: int) -> None:
        row.token_ids = list(ids)
        turns.finished(row)

    first, other = asked((0, [5, 6]), (1, [5, 6]))
    assert first.name != other.name
    assert first.kept
    (beside,) = asked((0, [5, 6]))  # while the first is under way
    assert beside.name not in (first.name, other.name)
    said(first, 7)
    said(beside, 8)
    (more,) = asked((0, [5, 6, 8, 9]))
    assert more.name == beside.name
    (more,) = asked((0, [5, 6, 7]))
    assert more.name == first.name
    said(more, 1)
    (anew,) = asked((0, [9, 9]))
    assert anew.name not in (first.name, beside.name)
    processes.says = [["end", 0, {"stop": "answer"}]]
    assert turns.poll(0.0) == []
    assert turns.done() == [first.name]  # the others are under way
    said(anew, 2)
    assert turns.done() == [anew.name]
    assert turns.done() == []


def begun(attempts: int = 1) -> tuple[Scripted, Sessions]:
    """One trajectory."""
    processes, given = Scripted(), SimpleNamespace(seconds=1.0)
    turns = Sessions(lambda: (given, None, processes), count(), attempts=attempts)  # type: ignore[arg-type]
    turns.start([Row(5, 0, [], Sampling(), 11)], [{}])
    return processes, turns


def sampled(processes: Scripted, turns: Sessions, number: int, ids: list[int], *said: int) -> Row:
    """A turn that is asked for, and what the model says."""
    processes.says = [["turn", 0, number, ids, {}, []]]
    (row,) = turns.poll(0.0) or ()
    row.token_ids, row.log_probs, row.policy_version = list(said), [-0.5] * len(said), [0] * len(said)
    turns.finished(row)
    return row


def at_its_end(processes: Scripted, turns: Sessions) -> Trajectory:
    processes.says = [["end", 0, {"stop": "answer"}]]
    assert turns.poll(0.0) is None
    (one,) = turns.take()
    return one.trajectory


def test_only_turns_that_a_life_was_given_are_trained():
    processes, turns = begun()
    _ = sampled(processes, turns, 0, [5, 6], 7)
    _ = sampled(processes, turns, 1, [5, 6, 7, 8], 9)
    processes.says = ["died with SIGKILL"]
    _ = turns.poll(0.0)
    processes.says = [["turn", 0, 0, [5, 6], {}, []]]  # again: answered with what was sampled
    assert turns.poll(0.0) == []
    assert processes.workers[-1].told[-1][:4] == ("turn", 0, 0, [7])
    _ = sampled(processes, turns, 1, [5, 6, 7, 4], 3)
    (row,) = at_its_end(processes, turns).rows
    assert row.prompt_ids + row.token_ids == [5, 6, 7, 4, 3]


def test_a_trajectory_that_is_tried_again_draws_anew():
    processes, turns = begun(attempts=2)
    first = sampled(processes, turns, 0, [5, 6], 7)
    processes.says = [["failed", 0, "why"]]
    _ = turns.poll(0.0)
    again = sampled(processes, turns, 0, [5, 6], 8)
    assert again.seed != first.seed
    (row,) = at_its_end(processes, turns).rows
    assert row.prompt_ids + row.token_ids == [5, 6, 8]


def test_a_process_with_calls_that_hang_gets_no_further_trajectory():
    processes, turns = begun()
    _ = sampled(processes, turns, 0, [5, 6], 7)
    processes.says = [["stuck", 1]]
    _ = turns.poll(0.0)
    turns.start([Row(6, 0, [], Sampling(), 12)], [{}])
    _ = turns.poll(0.0)
    assert [what for what, *_ in processes.told].count("start") == 1
    _ = turns.withdraw(None, keep=False)
    _ = turns.poll(0.0)
    assert processes not in processes.workers


class EndingRank:
    """Of a replica whose trajectories all end while weights are transferred."""

    unfinished = ()

    def __init__(self, is_first: bool) -> None:
        self.is_first = is_first

    def serve(self, source: Any, kept: set[str]) -> int:
        return 0

    def abandon(self, kept: set[str]) -> None: ...


def advanced(agent: Agent, is_first: bool) -> ActingSession:
    rank: Any = EndingRank(is_first)
    session = ActingSession(rank, "", count())
    session.start(agent, [Row(3, 0, [1], Sampling(), 0)], Batch({"row_id": [3]}), 1)
    session.advance_while(lambda: True)
    return session


def test_trajectories_that_ended_during_a_transfer_have_to_be_taken():
    own, other = Agent(tools=[add]), Agent(environment=Shop)
    session = advanced(own, is_first=False)
    assert session.under_way == 0
    for asked in (other, None):
        with pytest.raises(ConfigError, match="until they were returned"):
            session.check(asked)
    session.check(own)
    assert session.advance(Until(rows=1)) is None
    session.check(other)


def test_withdrawn_trajectories_are_not_returned():
    """On the first rank: one that had ended is forgotten, too."""
    session = advanced(Agent(tools=[add]), is_first=True)
    turns: Any = session._turns
    (key,) = turns._sessions
    turns.ended[key] = turns._sessions.pop(key)
    assert session.withdraw(None, keep=False) == []
    session.check(Agent(environment=Shop))
    assert session.advance(Until(rows=1)) == []


def ended(*failures: str | None) -> list[Any]:
    return [SimpleNamespace(begun=SimpleNamespace(row_id=i), failure=one) for i, one in enumerate(failures)]


@pytest.mark.parametrize(
    ("failures", "settings", "refused"),
    [
        (["gone"] * 8, {}, True),
        (["gone"] * 7, {}, False),  # chance
        (["gone"] * 7 + [None], {}, False),
        (["gone"] * 3 + [None] * 5, {"max_failed": 0.25}, True),
        (["gone"] * 2 + [None] * 6, {"max_failed": 0.25}, False),
        (["gone"] + [None] * 7, {"max_failed": 0.0}, True),
        (["gone", None], {"on_failure": "raise"}, True),
        ([None] * 9, {"max_failed": 0.0, "on_failure": "raise"}, False),
    ],
)
def test_a_call_of_which_too_much_failed_is_an_error(failures, settings, refused, caplog):
    agent = Agent(tools=[add], **settings)
    with pytest.raises(RewardError, match="row 0: gone") if refused else nullcontext():
        report_failures(ended(*failures), agent)
    assert ("They are masked" in caplog.text) == (not refused and "gone" in failures)
