"""Children of a process that forks, or whose template process is killed; and what passes between them."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import closing
from fractions import Fraction

import numpy as np
import pytest
import torch

from hybridflow.errors import ConfigError
from hybridflow.rewards import RowFailure
from hybridflow.rewards.function_adapters import Breakdown
from hybridflow.rewards.limited_calls import ProcessPool, plain


def answers(pool, calls, seconds=20.0):
    return pool.map(calls, seconds if isinstance(seconds, list) else [seconds] * len(calls))


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
    with closing(ProcessPool(behaving(), 1)) as made:
        yield made


def test_a_forked_copy_leaves_the_children_of_its_parent_alone():
    """It starts children of its own, and nothing that it does is felt by the parent: map, close, or its end."""
    with closing(ProcessPool(behaving(), 2)) as made:
        answers(made, [("answer", 1)])
        template = made._template.server._process.pid  # type: ignore[union-attr]
        for act in (lambda: answers(made, [("answer", 2)]) == [2], made.close, gc.collect):
            if not (forked := os.fork()):
                status = 1
                try:
                    status = 0 if act() is not False else 2
                    made.close()
                finally:
                    os._exit(status)
            assert os.waitpid(forked, 0)[1] == 0
            outcomes = answers(made, [("exit",), ("answer", 3), ("sleep",)], seconds=[20, 20, 0.3])
            assert outcomes == [Breakdown("exited with code 3"), 3, Breakdown("took longer than 0.3 s")]
            assert made._template.server._process.pid == template  # type: ignore[union-attr]


def test_a_fork_while_a_round_is_running_does_not_hang():
    """Another thread holds the lock of the children, which is held for ever in the copy."""
    with closing(ProcessPool(lambda value: time.sleep(0.5) or value, 1)) as slow:
        thread = threading.Thread(target=slow.map, args=([(1,)], [20]))
        thread.start()
        while not slow._lock.locked():
            time.sleep(0.01)
        if not (forked := os.fork()):
            signal.alarm(30)
            os._exit(0 if answers(slow, [(2,)]) == [2] and slow.close() is None else 1)
        assert os.waitpid(forked, 0)[1] == 0
        thread.join()


@pytest.mark.parametrize("busy", [False, True])
def test_a_template_process_that_dies_is_started_anew(busy):
    """Idle, or while calls run: those fail, the others are answered."""
    with closing(ProcessPool(behaving(), 2)) as made:
        answers(made, [("answer", 1)])
        process = made._template.server._process  # type: ignore[union-attr]
        if busy:
            threading.Timer(0.5, process.kill).start()
        else:
            process.kill()
            process.wait()
        outcomes = answers(made, [("nap", n) for n in range(6)] if busy else [("answer", n) for n in range(6)])
        failed = [one.reason for one in outcomes if isinstance(one, Breakdown)]
        assert set(failed) <= {"ended when something killed the template process of the workers"}
        assert 1 <= len(failed) <= 2 if busy else not failed
        assert all(isinstance(one, Breakdown) or one == number for number, one in enumerate(outcomes))


def test_answers_are_plain_data(children):
    """Numbers of every type arrive as Python's."""
    values = [np.float32(0.5), np.arange(3), torch.ones(2, dtype=torch.bool), Fraction(1, 2), {"a": (1, {2})}, None]
    found = [plain(value) for value in values]
    assert found == [0.5, [0, 1, 2], [True, True], 0.5, {"a": (1, {2})}, None]
    assert [type(found[0]), type(found[3]), type(found[1][0])] == [float, float, int]
    (failure,) = answers(children, [("answer", RowFailure("odd", ValueError()))])
    assert failure == RowFailure("odd")
    (refused,) = answers(children, [("answer", 1j)])
    assert refused.reason.startswith("answered with what cannot be sent back: raised TypeError: a complex is neither")


def test_what_cannot_be_sent_is_said(children):
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"<lambda> cannot be sent to a worker process \(TypeError.*lock"):
        ProcessPool(lambda: lock, 1).map([()], [20])
    outcomes = answers(children, [("answer", lock), ("answer", 1)])
    assert outcomes[0].reason.startswith("was given what cannot be sent to it: ")
    assert outcomes[1] == 1
