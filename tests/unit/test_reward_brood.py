"""Children of a process that forks, or whose nursery is killed; and what passes between them."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
import torch

from hybridflow.errors import ConfigError
from hybridflow.rewards import Children, Outcome, RowFailure
from hybridflow.rewards.child import plain, read_answer


def behaving():
    """A function that does what the call says. Made here, so that a child need not import this file, and torch."""

    def behave(what, *args):
        if what == "answer":
            return args[0]
        if what == "exit":
            os._exit(3)
        time.sleep(60 if what == "sleep" else 1.5)
        return args[0]

    return behave


@pytest.fixture(scope="module")
def children():
    with Children(behaving(), 1, seconds=20) as made:
        yield made


def test_a_forked_copy_leaves_the_children_of_its_parent_alone():
    """It starts children of its own, and nothing that it does is felt by the parent: map, close, or its end."""
    with Children(behaving(), 2, seconds=20) as made:
        made.map([(("answer", 1), {})])
        nursery = made._brood.nursery._process.pid  # type: ignore[union-attr]
        for act in (lambda: made.map([(("answer", 2), {})]) == [Outcome(2)], made.close, gc.collect):
            if not (forked := os.fork()):
                status = 1
                try:
                    status = 0 if act() is not False else 2
                    made.close()
                finally:
                    os._exit(status)
            assert os.waitpid(forked, 0)[1] == 0
            outcomes = made.map([(("exit",), {}), (("answer", 3), {}), (("sleep",), {})], seconds=[20, 20, 0.3])
            assert [(one.value, one.failure) for one in outcomes] == [
                (None, "exited with code 3"),
                (3, None),
                (None, "took longer than 0.3 s"),
            ]
            assert made._brood.nursery._process.pid == nursery  # type: ignore[union-attr]


def test_a_fork_while_a_round_is_running_does_not_hang():
    """Another thread holds the lock of the children, which is held for ever in the copy."""
    with Children(lambda value: time.sleep(0.5) or value, 1, seconds=20) as slow:
        thread = threading.Thread(target=slow.map, args=([((1,), {})],))
        thread.start()
        while not slow._lock.locked():
            time.sleep(0.01)
        if not (forked := os.fork()):
            signal.alarm(30)
            os._exit(0 if slow.map([((2,), {})]) == [Outcome(2)] and slow.close() is None else 1)
        assert os.waitpid(forked, 0)[1] == 0
        thread.join()


@pytest.mark.parametrize("busy", [False, True])
def test_a_nursery_that_dies_is_started_anew(busy):
    """Idle, or while calls run: those fail, the others are answered."""
    with Children(behaving(), 2, seconds=20) as made:
        made.map([(("answer", 1), {})])
        process = made._brood.nursery._process  # type: ignore[union-attr]
        if busy:
            threading.Timer(0.5, process.kill).start()
        else:
            process.kill()
            process.wait()
        outcomes = made.map([(("nap", n), {}) for n in range(6)] if busy else [(("answer", n), {}) for n in range(6)])
        failed = [one.failure for one in outcomes if not one.ok]
        assert set(failed) <= {"ended when something killed the process that starts children"}
        assert 1 <= len(failed) <= 2 if busy else not failed
        assert [one.value for one in outcomes] == [number if one.ok else None for number, one in enumerate(outcomes)]


class Harmful:
    def __reduce__(self):
        return os.mkdir, (os.environ["HARM"],)


def test_answers_are_plain_data(children, tmp_path, monkeypatch):
    """Reading an answer calls nothing of the function's; numbers of every type arrive as Python's."""
    values = [np.float32(0.5), np.arange(3), torch.ones(2, dtype=torch.bool), Fraction(1, 2), {"a": (1, {2})}, None]
    found = [plain(value) for value in values]
    assert found == [0.5, [0, 1, 2], [True, True], 0.5, {"a": (1, {2})}, None]
    assert [type(found[0]), type(found[3]), type(found[1][0])] == [float, float, int]
    assert read_answer(pickle.dumps(found)) == found
    (failure,) = children.map([(("answer", RowFailure("odd", ValueError())), {})])
    assert failure == Outcome(RowFailure("odd"))
    (refused,) = children.map([(("answer", 1j), {})])
    assert refused.failure.startswith("answered with what cannot be sent back: raised TypeError: a complex is neither")

    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    with pytest.raises(pickle.UnpicklingError, match="mkdir is no plain data"):
        read_answer(pickle.dumps(("value", Harmful())))
    assert not (tmp_path / "harm").exists()


def test_what_cannot_be_sent_is_said(children):
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"<lambda> cannot be sent to a child process \(TypeError.*lock"):
        Children(lambda: lock, 1, seconds=1).map([((), {})])
    outcomes = children.map([(("answer", lock), {}), (("answer", 1), {})])
    assert outcomes[0].failure.startswith("was given what cannot be sent to it: ")
    assert outcomes[1] == Outcome(1)
