"""A set of processes that share one gloo world and run whatever function they are sent, for whole test files."""

from __future__ import annotations

import datetime
import gc
import itertools
import multiprocessing as mp
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.engines.process_groups import ProcessGroups, RankContext
from hybridflow.topology import RankGrid

CPU = torch.device("cpu")
TIMEOUT = 120.0
THREADS = 40


class World:
    """What a function running in one of the processes is given: its world rank and a way to form groups."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.rank, self.store = rank, store
        self._contexts: list[RankContext] = []

    def context(self, name: str, grid: RankGrid, first: int = 0, role: str = "actor") -> RankContext:
        """This process as a rank of a model group on world ranks `first : first + grid.size`."""
        rank = self.rank - first
        members = range(first, first + grid.size)
        groups = ProcessGroups(self.store, name, members, rank, CPU, TIMEOUT)
        self._contexts.append(RankContext(role, rank, grid, CPU, groups))
        return self._contexts[-1]

    def close(self) -> None:
        """Close the groups of all contexts: every gloo group has threads, and a file has hundreds of groups."""
        for context in self._contexts:
            context.groups.close()
        self._contexts.clear()
        if len(os.listdir("/proc/self/task")) > THREADS:
            gc.collect()


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=TIMEOUT))
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=size)
    world = World(rank, store)
    while (message := pipe.recv_bytes()) != b"":
        try:
            function, args = pickle.loads(message)
            answer = (True, function(world, *args))
        except Exception:
            answer = (False, traceback.format_exc())
        world.close()
        pipe.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()


class RankProcesses:
    """`size` processes; `run` calls a function in the first `ranks` of them and returns their results.

    `failed`: some call raised or did not answer, so a rank may still wait for a peer.
    """

    def __init__(self, size: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._names = itertools.count()
        self.failed = False
        spawn = mp.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            spawn.Process(target=_serve, args=(rank, size, self._store.port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def name(self) -> str:
        """A name that no model group had before."""
        return f"group-{next(self._names)}"

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(world, *args)` in the first `ranks` processes. Raises with the traceback of the first failure."""
        message = pickle.dumps((function, args))
        before, self.failed = self.failed, True
        for pipe in self._pipes[:ranks]:
            pipe.send_bytes(message)
        answers = self._answers(self._pipes[:ranks])
        self.failed = before
        return answers

    def _answers(self, pipes: Sequence[Connection]) -> list[Any]:
        deadline, out = time.monotonic() + TIMEOUT, []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} did not answer within {TIMEOUT} s")
            good, value = pickle.loads(pipe.recv_bytes())
            if not good:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            out.append(value)
        return out

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if self.failed:
                process.kill()
            else:
                pipe.send_bytes(b"")
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
