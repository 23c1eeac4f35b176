"""A set of processes that share one torch world and run whatever function they are sent, for whole test files.

They compute on the CPU, with gloo, or with TEST_DEVICE=cuda on one CUDA device each, with NCCL.
"""

from __future__ import annotations

import datetime
import gc
import io
import itertools
import multiprocessing as mp
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridflow.engines.process_groups import ProcessGroups, RankContext
from hybridflow.topology import RankGrid

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
TIMEOUT = 120.0
THREADS = 40
OLD = 200_000
"""Objects that the collector looks at: many more were imported, and vLLM takes its and ours back when it closes."""


class KeptGroups(ProcessGroups):
    """Groups of whoever computes on these ranks: one engine after the other, or several that take turns.

    Making groups takes as long as most updates of a tiny model, and DTensor learns about its operations mesh by mesh.
    """

    def close(self) -> None:
        """The next engine needs them."""


class World:
    """What a function running in one of the processes is given: its world rank and a way to form groups.

    It computes on `device`. `engines` are closed when the function is done, as workers close theirs: what it forgot
    does not meet the next one.
    """

    def __init__(self, rank: int, store: dist.Store, device: torch.device) -> None:
        self.rank, self.store, self.device = rank, store, device
        self.engines: list[Any] = []
        self._contexts: list[RankContext] = []
        self._kept: dict[range, KeptGroups] = {}
        self._modules = self._forgotten = 0

    def context(
        self, name: str, grid: RankGrid, first: int = 0, role: str = "actor", kept: bool = False
    ) -> RankContext:
        """This process as a rank of a model group on world ranks `first : first + grid.size`.

        With `kept` its process groups are those of all such model groups on these ranks, instead of its own.
        """
        rank, members = self.rank - first, range(first, first + grid.size)
        groups: ProcessGroups
        if not kept:
            groups = ProcessGroups(self.store, name, members, rank, self.device, TIMEOUT)
        elif members in self._kept:
            groups = self._kept[members]
        else:
            name = f"kept-{self._forgotten}-{members}"
            groups = self._kept[members] = KeptGroups(self.store, name, members, rank, self.device, TIMEOUT)
        self._contexts.append(RankContext(role, rank, grid, self.device, groups))
        return self._contexts[-1]

    def close(self) -> None:
        """Close all engines, and the groups of all contexts: a gloo group has threads, and a file hundreds of groups.

        What was imported lives for ever: a collector that looked at it again and again would take half of the time.
        """
        for engine in self.engines:
            engine.close()
        for context in self._contexts:
            context.groups.close()
        self.engines.clear()
        self._contexts.clear()
        if len(sys.modules) > self._modules or len(gc.get_objects(2)) > OLD:
            gc.collect()
            gc.freeze()
            self._modules = len(sys.modules)
        elif threads() > THREADS:
            gc.collect()

    def forget(self) -> None:
        """Close the groups that were kept."""
        for groups in self._kept.values():
            ProcessGroups.close(groups)
        self._kept.clear()
        self._forgotten += 1  # names of groups are not used again
        gc.collect()


def forking() -> mp.context.ForkServerContext:
    """Processes that start with the backends imported, once for all of them."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.contracts.imported"])
    return context


def threads() -> int:
    """Of this process."""
    return len(os.listdir("/proc/self/task"))


class _OnHost(pickle.Pickler):
    """Tensors arrive on the CPU: the memory of another process's device is gone when its function has returned."""

    def reducer_override(self, obj: Any) -> Any:
        return obj.cpu().__reduce_ex__(2) if isinstance(obj, torch.Tensor) and obj.is_cuda else NotImplemented


def _sent(answer: tuple[bool, Any]) -> bytes:
    buffer = io.BytesIO()
    _OnHost(buffer).dump(answer)
    return buffer.getvalue()


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    device, backend = DEVICE, "gloo"
    if DEVICE.type == "cuda":
        device, backend = torch.device("cuda", rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=TIMEOUT))
    dist.init_process_group(backend, store=dist.PrefixStore("world", store), rank=rank, world_size=size)
    world = World(rank, store, device)
    while (message := pipe.recv_bytes()) != b"":
        try:
            function, args = pickle.loads(message)
            answer = (True, function(world, *args))
        except Exception:
            answer = (False, traceback.format_exc())
        world.close()
        pipe.send_bytes(_sent(answer))
    os._exit(0)  # nothing is left to be said, and taking an interpreter with these modules apart takes seconds


class RankProcesses:
    """`size` processes; `run` calls a function in the first `ranks` of them and returns their results.

    `failed`: some call raised or did not answer, so a rank may still wait for a peer. The next call is given new
    processes: it does not meet what that one broke.
    """

    def __init__(self, size: int) -> None:
        if DEVICE.type == "cuda" and torch.cuda.device_count() < size:
            pytest.skip(f"{size} ranks need {size} CUDA devices")
        self.size, self._names = size, itertools.count()
        self._start()

    def _start(self) -> None:
        self.failed = False
        listener = socket.create_server(("127.0.0.1", 0))  # the store itself would listen on all interfaces
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        server = forking()
        pipes = [server.Pipe() for _ in range(self.size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            server.Process(target=_serve, args=(rank, self.size, self._store.port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def name(self) -> str:
        """A name that no model group had before."""
        return f"group-{next(self._names)}"

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(world, *args)` in the first `ranks` processes. Raises with the traceback of the first failure."""
        if self.failed:
            self.close()
            self._start()
        message = pickle.dumps((function, args))
        self.failed = True
        for pipe in self._pipes[:ranks]:
            pipe.send_bytes(message)
        answers = self._answers(self._pipes[:ranks])
        self.failed = False
        return answers

    def _answers(self, pipes: Sequence[Connection]) -> list[Any]:
        deadline, out = time.monotonic() + TIMEOUT, []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} did not answer within {TIMEOUT} s")
            try:
                good, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                self._processes[rank].join(5)
                raise AssertionError(f"rank {rank} died: exit code {self._processes[rank].exitcode}") from None
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
