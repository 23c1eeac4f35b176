"""Host: the process of one device. It holds any number of models and runs their calls one at a time.

    driver --CallRequest(what all ranks share, own inputs, references)--> Host --> worker.method(Batch) --> Manifest

A call never raises through Ray: inputs that failed or are lost arrive as values, the ranks of a group agree before the
first collective that all have theirs, and failures are returned as values. So no rank skips a call that its peers run.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import pickle
import platform
import socket
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
import ray.exceptions
import torch
import torch.distributed as dist
from ray import cloudpickle

from hybridflow.batch.batch import Batch
from hybridflow.cluster.backend import Deadlines, RankCall, RankGroup
from hybridflow.cluster.call_request import call_of, take_lost_arguments
from hybridflow.cluster.device import IMAGE, DeviceUse, check_cuda, device_index, explain, make_deterministic
from hybridflow.cluster.expected_calls import ExpectedCalls
from hybridflow.cluster.future import Failure, Status, Stored, failure_of, fetch, first_failure
from hybridflow.cluster.liveness import LivenessServer
from hybridflow.cluster.member import Member
from hybridflow.cluster.row_refs import CallOrigin, RankRows
from hybridflow.cluster.state_images import ImageHead, StateImage
from hybridflow.cluster.store import Manifest, Reader, write
from hybridflow.cluster.weight_channels import ChannelSpec, HostTransfer, Setup, TransferTask, WeightChannel, incomplete
from hybridflow.engines import process_groups
from hybridflow.engines.call_events import MAPPED, CallWork, Event, bytes_of, events_of, memory_used, work_of
from hybridflow.engines.process_groups import ProcessGroups, RankContext
from hybridflow.engines.time_sharing import SharedStages
from hybridflow.errors import BatchError, CheckpointError, DeviceMemoryError, HybridFlowError, MissingColumnError
from hybridflow.settings import own_settings

logger = logging.getLogger(__name__)
_CONNECT = datetime.timedelta(seconds=60)  # to a running store
_SMALL_BYTES = 8192
_CHATTY = ("megatron", "torch.distributed")  # they warn at import and on every collective about deliberate choices


@dataclass(repr=False)
class Host:
    """Runs in a Ray actor, see the module docstring. Only the session, the pool and groups call its methods.

    `rank` is its rank in the torch world of the pool's `size` processes (0: no torch world).
    """

    pool: str
    rank: int
    size: int
    use_cuda: bool
    threads: int
    deadlines: Deadlines
    deterministic: bool = False
    prefetch: float | None = None
    _members: dict[str, Member] = field(default_factory=dict)
    _channels: dict[str, WeightChannel | Failure] = field(default_factory=dict)
    _lost: dict[tuple[str, int], float] = field(default_factory=dict)
    _events: deque[Event] = field(default_factory=lambda: deque(maxlen=10_000))
    _store: Any = None
    _unjoined: Exception | None = None
    _peak: int = 0
    _following: tuple[int, Any] = (0, None)  # a call, and the transfer right after it
    _waits: bool = False  # models here wait in host memory
    _node: str = field(default_factory=socket.gethostname)

    def __repr__(self) -> str:  # Ray prefixes the process's output with it
        return f"host {self.rank}"

    def __post_init__(self) -> None:
        for package in _CHATTY:
            warnings.filterwarnings("ignore", module=package)
        own = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0] or "1"  # also of `ray start`; Ray sets 1
        torch.set_num_threads(self.threads if own == "1" else int(own))
        torch.backends.cuda.enable_cudnn_sdp(False)  # vLLM's import does: training computes the same without it
        index = device_index(ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        self.device = torch.device("cuda", index) if self.use_cuda else torch.device("cpu")
        take_lost_arguments()
        process_groups.gloo_address = address = ray.util.get_node_ip_address()
        self.reader = Reader(self.deadlines.peers)
        self._expected = ExpectedCalls(self._worker_of, self.device, self.prefetch)
        self._liveness = LivenessServer(address, self._abort, self._expected.add)

    def _worker_of(self, group: str) -> Any:
        """None where the group cannot run calls."""
        member = self._members.get(group)
        return None if member is None or member.failure or member.incomplete else member.worker

    def address(self) -> tuple[str, int, bytes]:
        """Host, port and key of this process's `LivenessServer`."""
        return *self._liveness.address, self._liveness.key

    def _abort(self, pool: str, rank: int, at: float) -> None:
        """This process of a pool is lost, since the driver's time `at`: end the waits for it in groups and channels,
        also in later ones. Runs in another thread."""
        self._lost[pool, rank] = at
        for member in list(self._members.values()) if pool == self.pool else ():
            if rank in member.context.groups.ranks:
                member.abort()
        for channel in list(self._channels.values()):
            if isinstance(channel, WeightChannel) and channel.spec.lost({(pool, rank): at}):
                channel.abort()

    def join(self, store: tuple[str, int], world: str) -> None:
        """Join the torch world of this name through the session's rendezvous store at this host and port.

        The driver does not wait for this call: `create` raises its errors.
        """
        peers = datetime.timedelta(seconds=self.deadlines.peers)
        try:
            self._store = dist.TCPStore(*store, None, False, _CONNECT, wait_for_workers=False)
            self._store.set_timeout(peers)
            if self.use_cuda:
                check_cuda(self.device.index)
            if self.deterministic:
                make_deterministic(self.device.index)
            backend, own = "cpu:gloo,cuda:nccl" if self.use_cuda else "gloo", dist.PrefixStore(world, self._store)
            # without device_id: torch would make every nccl group by splitting this one, with all of its processes
            dist.init_process_group(backend, store=own, rank=self.rank, world_size=self.size, timeout=peers)
        except Exception as error:
            self._unjoined = error

    def create(self, seq: int, ranks: RankGroup, nodes: tuple[int, ...], uninitialized: bool) -> Failure | None:
        """Build one rank of a group, of which rank i is on the node `nodes[i]`; `uninitialized`: its weights will be
        written from outside.

        Later calls return the same failure.
        """
        role, rank, start, before = ranks.name, ranks.members.index(self.rank), time.time(), memory_used(self.device)
        groups = ProcessGroups(self._store, ranks.key, ranks.members, rank, self.device, self.deadlines.collective)
        context = RankContext(
            role, rank, ranks.grid, self.device, groups, uninitialized=uninitialized, nodes=nodes, node=self._node
        )
        member = self._members[ranks.key] = Member(role, rank, context, ranks.settings)
        if any((self.pool, one) in self._lost for one in ranks.members):
            member.abort()
        self._waits |= bool(ranks.spec.waits)
        try:
            if self._unjoined is not None:
                raise self._unjoined
            # known at once: `drop` closes half-built ones too
            worker = member.worker = object.__new__(ranks.worker_class)
            worker.context = context
            with self._liveness.during(f"{role}.__init__"):
                worker.__init__(**own_settings(ranks.worker_class, ranks.settings))
        except Exception as error:
            member.failure = self._failure(member, "__init__", None, error)
        times, memory = (start, start, time.time()), (before, memory_used(self.device))
        if self.use_cuda and member.failure is None:  # rotary tables, inputs of captured graphs, ...
            member.buffers = max(0, memory[1] - before - sum(getattr(worker, "resident_bytes", dict)().values()))
        own = (None, seq, role, "__init__", self.pool, self.rank, *times, 0, 0, *memory)
        self._events.append(Event("call", *own, failed=member.failure is not None))
        return member.failure

    def call(self, *request: Any) -> bytes | Status:
        """Run one method, of a `CallRequest`. Returns the status, with the method's value."""
        return _answer(*self._called(call_of(*request)))

    @ray.method(num_returns=2)
    def call_writing(self, *request: Any) -> tuple[Manifest | Failure, bytes | Status]:
        """Run one method that writes columns. Returns their Manifest, and the status, which outlives the data."""
        result, status = self._called(call_of(*request))
        return result, status.packed()

    @ray.method(num_returns=2)
    def call_together(self, counts: Sequence[int], *requests: Any) -> list[bytes | Status] | bytes | Status:
        """Run updates of models that share their pipeline stages, from `counts` arguments of each request; the status
        of each, one after the other."""
        ends = list(itertools.accumulate(counts))
        calls = [call_of(*requests[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        members = [self._members[call.group] for call in calls]
        names = " and ".join(f"{member.role}.{call.method}" for member, call in zip(members, calls, strict=True))
        with self._liveness.during(names):
            # also where one of them cannot run: other ranks do not know that
            engines = [None if member.failure or member.incomplete else member.worker.engine for member in members]
            stages = SharedStages(engines, members[0].context)
            found = stages.run([partial(self._called, call) for call in calls])
            statuses = [_answer(result, status) for result, status in found]
            return statuses if len(statuses) > 1 else statuses[0]

    def _called(self, call: RankCall) -> tuple[Any, Status]:
        member = self._members[call.group]
        context, start = member.context, time.time()
        if (failure := member.failure or member.incomplete) is not None:
            return failure, Status(failure)
        context.step, context.call, context.compares = call.step, call.seq, call.compares
        context.method, context.failed_stage, context.send_beside = call.method, "", self._sending(member, call)
        if self.use_cuda and torch.cuda.is_initialized():  # a call's peak is measured from here
            context.peak = self._peak = max(self._peak, MAPPED.peak(restart=True))
        before, ready, work, sizes, output = memory_used(self.device), start, CallWork(), (0, 0), None
        ahead = self._expected.running(call) if self._waits else nullcontext()
        with self._liveness.during(f"{member.role}.{call.method}"), ahead:
            result = inputs = self._inputs(member, call)
            if not isinstance(inputs, Failure):
                ready = time.time()
                result, output = self._run(member, call, inputs)
            end = time.time()
            if not isinstance(inputs, Failure):
                sizes = bytes_of(inputs.values()), bytes_of((output,))
                work = _work(member, call, inputs, output)
        failure = result if isinstance(result, Failure) else None
        own = (call.step, call.seq, member.role, call.method, self.pool, self.rank, start, ready, end)
        memory = before, memory_used(self.device), MAPPED.peak() if self.use_cuda else None
        held = tuple((" ".join(owner), size) for owner, size in self._held().items())
        if self.use_cuda:
            stays = max(before, memory[1], *(stage.memory_after for stage in context.stages))
            held += (("activations", max(0, MAPPED.peak() - stays)),)
        event = Event("call", *own, *sizes, *memory, failure is not None, call.phase, work, held)
        events, skipped = (*events_of(context.stages, event), event), tuple(context.skipped)
        self._events.extend(events)
        context.stages.clear()
        context.skipped.clear()
        return result, Status(failure, events, skipped)

    def _sending(self, member: Member, call: RankCall) -> Callable[[Iterator[int]], None] | None:
        """`RankContext.send_beside` of a call."""
        seq, task = self._following
        if call.seq != seq or not isinstance(channel := self._channels.get(task.channel), WeightChannel):
            return None
        return partial(channel.send_beside, task, member, partial(self._failure, member, task.method, None))

    def _inputs(self, member: Member, call: RankCall) -> dict[str, Any] | Failure:
        """Read the inputs and agree with the other ranks that all have theirs; else return a rank's error."""
        outcome: dict[str, Any] | Failure
        try:
            outcome = {n: self.reader.read(v) if isinstance(v, RankRows) else v for n, v in call.settings.items()}
        except Exception as error:
            outcome = self._failure(member, call.method, call, error, upstream=True)
        if not call.agree:
            return outcome
        try:
            control = member.control(call.agree, self.deadlines.peers)
            return control.agree(outcome if isinstance(outcome, Failure) else None) or outcome
        except Exception as error:
            return self._failure(member, call.method, call, error)

    def _run(self, member: Member, call: RankCall, settings: dict[str, Any]) -> tuple[Any, Any]:
        """What the driver gets, and the method's own result (None if it raised)."""
        groups = member.context.groups
        member.context.row_number = partial(self.reader.row_number, call.settings, call.span)
        member.calls[call.method] += 1
        try:
            groups.check()
            try:
                result = getattr(member.worker, call.method)(**settings)
            finally:
                groups.check()  # its error replaces one that undefined results led to
            return self._written(result, call) if call.writes else result, result
        except Exception as error:
            if call.phase == "training":  # earlier steps of the call are done
                said = f"{call.method} of iteration {call.step} failed, perhaps halfway: {error}"
                member.failed_update = member.failed_update or said.splitlines()[0]
            return self._failure(member, call.method, call, error), None
        finally:
            member.context.row_number = int  # what it refers to must not stay in the object store

    def _written(self, result: Any, call: RankCall) -> Manifest:
        if result is None:  # a rank whose output no protocol collects, e.g. not the last pipeline stage
            return Manifest(0, {})
        if not isinstance(result, Batch):
            raise BatchError(
                f"{call.method} writes {call.writes} and must return a Batch, got {type(result).__name__}."
            )
        if missing := [name for name in call.writes if name not in result]:
            raise MissingColumnError(
                f"{call.method} declares the columns {missing}, but returned only {list(result.columns)}."
            )
        if call.rows is not None and result.rows != call.rows:
            raise BatchError(
                f"{call.method} returned {result.rows} rows where {call.rows} were due. "
                f"Declare @register(..., resizes=True) if it changes the number of rows."
            )
        return write(result)

    def _failure(
        self, member: Member, method: str, call: RankCall | None, error: Exception, upstream: bool = False
    ) -> Failure:
        if isinstance(error, torch.OutOfMemoryError | DeviceMemoryError):
            error = self._memory_error(member, method, error)
        origin = CallOrigin(member.role, member.rank, method, self._node, member.context.step)
        return failure_of(error, origin, None if call is None else call.span, upstream)

    def _held(self) -> Counter[tuple[str, str]]:
        """The account of this device: bytes by role and owner, and those of images in host memory."""
        held: Counter[tuple[str, str]] = Counter()  # a role may have ranks of several sizes here
        for each in self._members.values():
            try:
                found = getattr(each.worker, "resident_bytes", dict)()
                images = getattr(each.worker, "image_bytes", int)()
            except Exception:  # a worker that is half built
                logger.debug("the memory of %s is unknown", each.role, exc_info=True)
                continue
            for kind, size in (*found.items(), (IMAGE, images), ("buffers", each.buffers)):
                held[each.role, kind] += size
        return held

    def _memory_error(self, member: Member, method: str, error: Exception) -> DeviceMemoryError:
        """The error with an account of the device."""
        free, total = torch.cuda.mem_get_info() if self.use_cuda else (0, 0)
        shares = {
            each.role: getattr(each.settings.get("generate"), "memory_fraction", None)
            for each in self._members.values()
        }
        use = DeviceUse(total, free, self._held(), {role: share for role, share in shares.items() if share is not None})
        stage = member.context.failed_stage
        advises = isinstance(error, DeviceMemoryError)
        found = DeviceMemoryError(explain(member.role, method, stage, use, member.settings, str(error), advises))
        return found.with_traceback(error.__traceback__)

    def follow(self, seq: int, task: TransferTask) -> None:
        """Behind call `seq`, issued next, comes this transfer of what it trains."""
        self._following = seq, task

    @ray.method(num_returns=2)
    def transfer(self, task: TransferTask, setup: Setup | None) -> tuple[Any, Status]:
        """Take part in a weight transfer. Returns bytes and seconds, or a Failure, and the status."""
        start, before = time.time(), memory_used(self.device)
        sender, receiver = self._members.get(task.source), self._members.get(task.destination)
        mine = sender or receiver
        assert mine is not None
        mine.context.step, received, times = task.step, 0, None
        failed = partial(self._failure, mine, task.method, None)
        try:
            with self._liveness.during(f"{mine.role}.{task.method}"):
                result = channel = self._channel(task, setup, failed)
                if isinstance(channel, WeightChannel):
                    result = channel.run(HostTransfer(task, setup, sender, receiver, failed))
                    received, times = 0 if isinstance(result, Failure) else channel.received, channel.span
        except Exception as error:
            result = failed(error)
        if task.required and receiver is not None and isinstance(result, Failure):
            receiver.incomplete = receiver.incomplete or incomplete(result)
        failure = result if isinstance(result, Failure) else None
        begun, end = times or (start, time.time())
        own = (task.step, task.seq, mine.role, task.method, self.pool, self.rank, begun, begun, end)
        memory = (before, memory_used(self.device), None)
        event = Event("transfer", *own, received, 0, *memory, failure is not None)
        self._events.append(event)
        return result, Status(failure, (event,))

    def open_channel(self, spec: ChannelSpec, origin: CallOrigin) -> Failure | None:
        """Open this host's end of a channel; a failure names `origin`."""
        process, deadlines = (self.pool, self.rank), self.deadlines
        try:
            channel = WeightChannel(spec, process, self._store, self.device, deadlines.collective, deadlines.peers)
        except Exception as error:
            return failure_of(error, origin)
        self._channels[spec.name] = channel
        if spec.lost(self._lost):
            channel.abort()
        return None

    def _channel(
        self, task: TransferTask, setup: Setup | None, failed: Callable[[Exception], Failure]
    ) -> WeightChannel | Failure:
        """The channel of a transfer, or the failure to open it. A rank without the channel cannot notify its peers, so
        every rank asks all others at the first transfer and caches the answer."""
        if setup is not None and setup.opened:
            refs = [output.ref for output in setup.opened]
            try:
                failure = first_failure(fetch(refs, setup.opened, self.deadlines.peers, follow=False))
            except HybridFlowError as error:  # a host that is gone
                failure = failed(error)
            if failure is not None:
                self.close_channel(task.channel)
                self._channels[task.channel] = failure
        return self._channels[task.channel]

    def close_channel(self, name: str) -> None:
        """Forget a channel and its process groups."""
        if isinstance(channel := self._channels.pop(name, None), WeightChannel):
            channel.close()

    def apply(self, group: str, method: str, *arguments: Any) -> Any:
        """`worker.method(*arguments)` on this rank of a group; returns failures, like `call`."""
        member = self._members[group]
        try:
            with self._liveness.during(f"{member.role}.{method}"):
                return getattr(member.worker, method)(*arguments)
        except Exception as error:
            return self._failure(member, method, None, error)

    @ray.method(num_returns=2)
    def image(self, group: str, settings: Any, tensors: bool) -> tuple[StateImage | None, ImageHead | Failure]:
        """This rank's state, as it is now, and the head of it, or a Failure."""
        member = self._members[group]
        try:
            if (failure := member.failure or member.incomplete) is not None:
                raise failure.error
            if member.failed_update:
                raise CheckpointError(member.failed_update)
            with self._liveness.during(f"{member.role}.image"):
                image, head = member.worker.image(settings, tensors)
        except Exception as error:
            return None, self._failure(member, "image", None, error)
        return image, replace(head, calls=dict(member.calls))

    @ray.method(num_returns=2)
    def keep(self, image: Any) -> tuple[StateImage | None, ImageHead | None]:
        """A copy on this machine of another's image, if that is complete."""
        return (image, ImageHead(0, None)) if isinstance(image, StateImage) else (None, None)

    def calls(self, group: str) -> dict[str, int]:
        """How often this rank of a group has run each method, completely or not."""
        return dict(self._members[group].calls)

    def events(self) -> list[Event]:
        return list(self._events)

    def about(self) -> dict[str, Any]:
        """The device: `node`, `device`, its `name`, and its `memory` in bytes (None on the CPU). Initializes CUDA."""
        if not self.use_cuda:
            return {"node": self._node, "device": "cpu", "name": platform.machine(), "memory": None}
        found = torch.cuda.get_device_properties(self.device)
        index = (ray.get_gpu_ids() or [self.device.index])[0]  # on the node
        return {"node": self._node, "device": f"cuda:{index}", "name": found.name, "memory": found.total_memory}

    def drop(self, name: str) -> Failure | None:
        """Forget a group and free its model; logs and returns a failure of its `close`."""
        member = self._members.pop(name, None)
        if member is None:
            return None
        try:
            try:
                if (close := getattr(member.worker, "close", None)) is not None:
                    close()
            finally:
                member.context.groups.close()
        except Exception as error:
            logger.warning("%s could not be freed", name, exc_info=True)
            return self._failure(member, "close", None, error)
        return None

    def close(self) -> None:
        """Free all models and leave the torch world."""
        for name in list(self._channels):
            self.close_channel(name)
        for name in list(self._members):
            self.drop(name)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._liveness.close()


def _work(member: Member, call: RankCall, inputs: dict[str, Any], output: Any) -> CallWork:
    """A worker's own columns may be anything: without figures a call is still a call."""
    try:
        return work_of(member.worker, call.phase, member.context.grid, inputs, output)
    except Exception:
        logger.debug("the work of %s.%s is unknown", member.role, call.method, exc_info=True)
        return CallWork()


def _answer(value: Any, status: Status) -> bytes | Status:
    """The status of a call with the value that it returned, which stays in the object store if it is large."""
    if status.failure is not None or value is None:
        return status.packed()
    found = replace(status, value=value).packed()
    if isinstance(found, bytes):
        size = len(found)
    else:
        buffers = list[pickle.PickleBuffer]()
        size = len(cloudpickle.dumps(value, buffer_callback=buffers.append)) + sum(one.raw().nbytes for one in buffers)
    return found if size <= _SMALL_BYTES else replace(status, value=Stored(ray.put(value)))
