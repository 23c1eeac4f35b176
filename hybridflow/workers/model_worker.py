"""Base of actor, critic, reference and reward model (paper, section 4.1): checkpoint, strategy, early checks."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

from torch import Tensor

from hybridflow.algorithms.losses.loss import Loss
from hybridflow.algorithms.masked import batch_temperature, not_finite
from hybridflow.algorithms.trajectories import Trajectories
from hybridflow.batch.batch import Batch
from hybridflow.config import FSDP, DType, LoRA, Megatron, Optimizer, TrainStrategy, is_strategy
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.agreement import REDUCTIONS, SkippedSteps, agree
from hybridflow.engines.call_events import MAPPED
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.checkpoint.remote_directory import opened, written_here
from hybridflow.engines.checkpoint.writer import check_dtype, read_beside, save_checkpoint, saved_dtypes
from hybridflow.engines.contract import PARAMETERS, STATES, UNINITIALIZED, Output, TrainState
from hybridflow.engines.lora.adapters import CONFIG, check_adapters, check_injection, is_adapter_directory, read_config
from hybridflow.engines.lora.targets import modules, trained_tensors
from hybridflow.engines.replicas import check_replicas
from hybridflow.engines.shard_optimizer import check_groups
from hybridflow.engines.train_backends import backend, build_engine
from hybridflow.engines.train_engine import TrainEngine
from hybridflow.engines.worker_spec import WorkerSpec
from hybridflow.errors import BrokenGroupError, CheckpointError, ConfigError, PlacementError, add_outcome, rows_named
from hybridflow.models.hf_spec import Decoder, check_reading, read_spec, use_of
from hybridflow.models.spec import Head
from hybridflow.protocols.operation import OperationKind, Settings, register
from hybridflow.protocols.protocol import ONE_TO_ALL, ONE_TO_ONE, Protocol
from hybridflow.settings import require
from hybridflow.topology import RankGrid
from hybridflow.workers.worker import FREEZE, FROZEN, Worker

logger = logging.getLogger(__name__)
ALL_RANKS_FIRST_OUTPUT = Protocol("ALL_RANKS_FIRST_OUTPUT", ONE_TO_ALL.distribute, ONE_TO_ONE.collect)
"""All ranks compute together; rank 0 returns the result."""
_CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt", "*.tiktoken", "vocab*")
_CHECKPOINTS = ("model", "tokenizer", "teacher")  # settings that name a directory or hub model
_ELSEWHERE: tuple[OperationKind, ...] = ("inference", "function")  # calls that replicas can run


def find_checkpoint(model: str | os.PathLike[str], files: Sequence[str] = _CHECKPOINT_FILES) -> Path:
    """The given directory, or the local copy with these `files`, downloaded once, of an address or a hub name. Errors:
    CheckpointError."""
    if (remote := opened(model)) is not None:
        return remote.fetch_model(files)
    path = Path(model)
    if path.is_dir():
        return path.resolve()
    name = str(model)
    if path.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise CheckpointError(f"the checkpoint directory {name} does not exist.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name} is neither a directory nor a model that the hub gives here: {type(error).__name__}."
        ) from None


def local_checkpoint(model: str | os.PathLike[str]) -> Path:
    """The directory on this node that the driver found. Errors: CheckpointError."""
    if not (path := Path(model)).is_dir():
        raise CheckpointError(
            f"the checkpoint directory {model} is on the driver's machine and not on {socket.gethostname()}. Put it "
            f"where all nodes see it under the same path."
        )
    return path


def lora_of(settings: Mapping[str, Any]) -> LoRA | None:
    """The adapters that a worker's strategy trains, if it trains any."""
    return getattr(settings.get("train"), "lora", None)


def _with_saved_adapters(settings: Settings) -> dict[str, Any]:
    """If `model` is an adapter directory: settings with the adapters' base model, and the directory as their start.

    Errors: ConfigError for a strategy that trains other adapters or none;
    CheckpointError for adapters that cannot be read or whose base model is missing.
    """
    found, lora = dict(settings), lora_of(settings)
    saved = found.get("model")
    if saved is not None and is_adapter_directory(saved):
        base, start = read_config(saved)
        try:
            found["model"] = str(find_checkpoint(base))
        except CheckpointError as error:
            raise CheckpointError(f"{saved} has adapters of the model {base}: {error}") from None
    elif lora is not None and lora.start is not None:
        start = read_config(os.path.abspath(lora.start))[1]
    else:
        return found
    strategy = found["train"]
    if not isinstance(strategy, FSDP | Megatron):
        raise ConfigError(
            f"{start.start} has LoRA adapters, which train={strategy!r} does not compute. Use hf.FSDP() or "
            f"hf.Megatron()."
        )
    if lora is not None:
        spec = read_spec(found["model"], "lm")
        for name in ("rank", "alpha", "targets"):
            here, there = getattr(lora, name), getattr(start, name)
            require(
                modules(spec, lora) == modules(spec, start) if name == "targets" else here == there,
                f"LoRA({name}={here!r}): the adapters in {start.start} have {name}={there!r}. Leave lora= out to take "
                f"what they have.",
            )
        start = replace(lora, start=start.start)
    found["train"] = replace(strategy, lora=start)
    return found


def _resolved(settings: Settings) -> dict[str, Any]:
    """Makes checkpoint paths absolute; hub models are downloaded here and become their snapshots' paths."""
    found = {name: settings[name] for name in _CHECKPOINTS if settings.get(name) is not None}
    return _with_saved_adapters({**settings, **{name: str(find_checkpoint(path)) for name, path in found.items()}})


def _grid(worker: type[ModelWorker], strategy: Any, devices: int) -> RankGrid:
    given = strategy.__name__ if isinstance(strategy, type) else repr(strategy)
    require(
        is_strategy(strategy),
        f"{worker.__name__}(train={given}): give a strategy such as hf.Megatron(tp=2), hf.FSDP() or hf.ZeRO(stage=2).",
    )
    try:
        return strategy.grid(devices)
    except PlacementError as error:
        raise PlacementError(f"{worker.role}: {error}") from None


def _no_layout(role: str, grid: RankGrid) -> Layout:
    raise ConfigError(f"this {role} is a function: it has no weights that could be moved.")


def _check(
    worker: type[ModelWorker], settings: Settings, model: Callable[[], Decoder], grid: RankGrid, device_type: str
) -> None:
    """Check checkpoint, sizes and optimizer on the driver, from files' headers only."""
    name, role, spec = worker.__name__, worker.role, model()
    backend(settings["train"], "layout").check(settings["train"], spec, grid, role)
    check_reading(settings["model"], spec)
    Checkpoint(settings["model"]).check(spec)
    if (lora := lora_of(settings)) is not None:
        tensors = trained_tensors(spec, lora)
        check_injection(spec, lora)
        if lora.start is not None:
            check_adapters(lora.start, tensors, spec)
    good = isinstance(optimizer := settings.get("optim"), Optimizer | None)
    require(good, f"{name}(optim={optimizer!r}): give hf.Adam(lr=...) or hf.SGD(lr=...).")
    if optimizer is not None:
        of = backend(train := settings["train"], "layout")
        check_groups(optimizer, of.state_layout(train, spec, grid).tensors, of.weights_layout(train, spec, grid))
    good = type(offload := settings.get("offload", False)) is bool
    require(good, f"{name}(offload={offload!r}): the {role} waits as a whole, give True or False.")


def _check_save(settings: Settings, call: Any) -> None:
    if settings.get("model") is None:
        raise ConfigError("this worker calls a function: there is nothing to save.")
    check_dtype(call.get("dtype"))
    remote = opened(call["path"])
    call["path"] = os.path.abspath(call["path"]) if remote is None else remote.address


def _optimizer_changes(settings: Settings, call: Settings) -> Settings:
    """What the call sets, as the optimizer's class has it. Errors: ConfigError for a value that it refuses."""
    optim = settings.get("optim")
    require(optim is not None, "set_optimizer: this group does not train. Give it optim=hf.Adam(lr=...) when placed.")
    given = {name: value for name, value in call.items() if value is not None}
    require(bool(given), "set_optimizer() changes nothing: give what should change, such as lr=1e-6.")
    changed = replace(cast("Optimizer", optim), **given)
    return {name: getattr(changed, name) for name in given}


class ModelWorker(Worker):
    """One rank of a sharded model as a `TrainEngine`."""

    head: ClassVar[Head] = "lm"
    engine: TrainEngine = None  # type: ignore[assignment]  # a reward function has none
    _beside: Mapping[str, bytes] = {}
    _frozen: Mapping[str, str] = {}
    _dtypes: Mapping[str, str] = {}  # of the files of its model
    _idle: tuple[TrainState, ...] = ()  # kept in host memory between calls
    _came: tuple[int, int] | None = None  # bytes copied until its state was there

    @classmethod
    def worker_spec(cls, settings: Settings) -> WorkerSpec:
        path, lora, train = settings.get("model"), lora_of(settings), cast("TrainStrategy", settings.get("train"))
        if path is None:
            return WorkerSpec(resolve=_resolved, layout=partial(_no_layout, cls.role))
        model = partial(read_spec, path, cls.head)
        apart = {"optim": None, "offload": True, "ema_decay": None}  # of replicas, which get the group's weights
        idle = {name: value for name, value in apart.items() if name in settings}
        fixed = (
            f"{cls.__name__} trains adapters of the weights in {path}: these cannot be replaced or laid out anew. "
            f"Save it and place another group with model= that directory."
        )
        return WorkerSpec(
            resolve=_resolved,
            grid=partial(_grid, cls, train),
            check=partial(_check, cls, settings, model),
            model=model,
            layout=lambda grid: backend(train, "layout").weights_layout(train, model(), grid),
            fixed=fixed if lora is not None else "",
            shares_stages=isinstance(train, Megatron) and settings.get("optim") is not None,
            waits=settings.get("offload"),
            replicas={} if lora is not None else dict.fromkeys(_ELSEWHERE, (cls, {**settings, **idle})),
        )

    def weights_storage(self) -> Mapping[str, Tensor]:
        self.engine.reload(self._idle)
        self._merge()
        return self.engine.storage()

    def _merge(self) -> None:
        """Merge adapters into the engine's storage until the current call ends."""
        if self.engine.adapters is not None:
            _ = self.engine.storage()  # all of it is there
            self.engine.adapters.merge()

    def _restore(self) -> None:
        if self.engine.adapters is not None:
            self.engine.adapters.restore()

    def on_weights_loaded(self) -> None:
        self.engine.weights_loaded()

    @property
    def has_tensors(self) -> bool:
        return self.engine is not None

    def use(self) -> Mapping[str, Any]:
        if not self.has_tensors:
            return {}
        lora = None if self.engine.adapters is None else self.engine.adapters.lora
        own = {} if lora is None else {"lora_alpha": lora.alpha, "lora_rank": lora.rank}
        return {**use_of(self.spec), **own, **self._frozen}

    def beside(self) -> Mapping[str, bytes]:
        if not self.has_tensors or self.engine.adapters is None:
            return self._beside
        return {CONFIG: self.engine.adapters.config(self.checkpoint)}

    def file_dtypes(self) -> Mapping[str, str]:
        adapted = self.has_tensors and self.engine.adapters is not None
        return {} if adapted else self._dtypes  # adapters: float32

    def optimizing_engine(self) -> TrainEngine | None:
        self.engine.reload(self._idle)
        return self.engine if self.engine.optimizer_layout() is not None else None

    def _build(
        self, model: str | os.PathLike[str], train: TrainStrategy, optim: Optimizer | None, offload: bool = False
    ) -> None:
        self.checkpoint = local_checkpoint(model)
        # the directory may be gone when `save` runs
        self._beside = read_beside(self.checkpoint) if self.context.rank == 0 else {}
        self.spec = read_spec(self.checkpoint, self.head)
        self._dtypes = Checkpoint(self.checkpoint).dtypes(self.spec.tensors())
        freeze = {FREEZE: ", ".join(names)} if optim and (names := getattr(train, "freeze", ())) else {}
        frozen = self.context.rank == 0 and (optim is None or freeze or getattr(train, "lora", None) is not None)
        self._frozen = {FROZEN: Checkpoint(self.checkpoint).fingerprint(), **freeze} if frozen else freeze
        weights = UNINITIALIZED if self.context.uninitialized else self.checkpoint
        self._skipped = SkippedSteps(self.context, optim)
        self.engine = build_engine(self.context, train, self.spec, weights, optim)
        if offload:
            self._idle = PARAMETERS if optim is None else STATES
            self.engine.offload(self._idle)

    @property
    def prefix(self) -> str:
        """Prefix of its metric names."""
        return self.role

    def fetch(self, what: Collection[TrainState]) -> None:
        """Begin to bring these parts of an idle model's state back, ahead of a call. Not collective."""
        with self.context.stage("prefetch", self.engine.copied_bytes):
            self.engine.reload([name for name in self._idle if name in what])

    def leave(self) -> None:
        """Offload an idle model that was fetched in vain."""
        self.engine.offload(self._idle)

    def away_bytes(self, what: Collection[TrainState]) -> int:
        """What `fetch` would allocate in device memory."""
        return self.engine.away_bytes([name for name in self._idle if name in what])

    @contextmanager
    def resident(self, what: Collection[TrainState] = STATES) -> Iterator[None]:
        """Keeps these parts of the state for a call in device memory; offloads an idle model afterwards."""
        try:
            if wanted := list(filter(what.__contains__, self._idle)):
                with self.context.stage("reload", self.engine.copied_bytes):
                    agree(self.context, partial(self.engine.reload, wanted))  # pyright: ignore[reportArgumentType]
                self._came = self.engine.copied_bytes()
            yield
        except BaseException:
            with suppress(BrokenGroupError):  # what is raised says why
                self._rest()
            raise
        self._rest()

    def _rest(self) -> None:
        self._restore()
        if self._idle:
            with self.context.stage("offload", self.engine.copied_bytes, self._came):
                self.engine.offload(self._idle)

    def _agreed(self, batch: Batch, outputs: Sequence[Output], loss: Loss | None = None) -> float:
        """The batch's temperature, after all ranks have agreed that they can compute their rows.

        Errors: those of a rank that cannot, on all ranks, before any collective of the model.
        """

        def check() -> float | None:
            if loss is not None and Trajectories.of(batch) is not None and loss.by_sequence:
                self.engine.tokens.split.check_whole()
            with rows_named(self.context.row_number):
                if loss is not None:
                    loss.check(batch)
                temperature = batch_temperature(batch) if self.head == "lm" else None
                self.engine.check(batch, outputs, 1.0 if temperature is None else temperature)
            return temperature

        agreed = agree(self.context, check, "the sampling temperature")
        return 1.0 if agreed is None else agreed

    def _computed(self, batch: Batch, output: Output, column: str) -> Batch | None:
        """`output` of the model for every response token, as `column`; None except on the last stage.

        Logs a warning for a value that is not finite: updates that read it skip their steps. Errors: those of
        `_agreed`.
        """
        with self.resident(PARAMETERS):
            out = self.engine.forward(batch, (output,), self._agreed(batch, (output,)))
        if out is None:
            return None
        found, context = Batch({column: out[output]}), self.context
        if context.coords.t == 0 and (bad := not_finite(batch.with_columns(**{column: out[output]}), (column,))):
            logger.warning("%s.%s: rank %d computed %s.", context.role, context.method, context.rank, bad)
        return found

    def _update(self, batch: Batch, loss: Loss, epochs: int) -> dict[str, float]:
        """Epochs over the mini-batches of `batch`, one optimizer step each.

        Metrics are averaged over the completed steps (nan without any), unless `loss.metrics` says otherwise;
        `skipped` counts the others. Errors:
        DivergenceError on all ranks after too many skipped steps in a row.
        """
        total, known = dict[str, list[float]](), dict[str, None]()
        outputs: tuple[Output, ...] = loss.outputs  # type: ignore[assignment]
        temperature = self._agreed(batch, outputs, loss)
        minibatches, skipped, engine = batch.chunks() * epochs, 0, self.engine
        engine.zero_grad()  # of an update that failed
        engine.announce(minibatches, loss)
        for number, minibatch in enumerate(minibatches, 1):
            try:
                metrics = engine.forward_backward(minibatch, loss, outputs, temperature)
                step = self._step(last=number == len(minibatches))
            except Exception as error:
                if number > 1:
                    after = f"the weights are those after the {number - 1 - skipped} optimizer steps before it."
                    add_outcome(error, f"It was mini-batch {number} of {len(minibatches)}: {after}")
                raise
            metrics |= {f"{self.prefix}/{name}": value for name, value in step.items() if name != "skipped"}
            if step["skipped"]:
                skipped += 1
                rows: list[int] = minibatch["row_id"].tolist() if "row_id" in minibatch else []
                self._skipped.skipped(number, len(minibatches), engine.skip_reason, rows, engine.overflowed)
            else:
                self._skipped.made()
            for name, value in metrics.items() if not step["skipped"] else ():
                total.setdefault(name, []).append(value)
            known |= dict.fromkeys(metrics)
        joins, made = loss.metrics, len(minibatches) - skipped
        means = dict.fromkeys(known, math.nan)
        for name, values in total.items():
            means[name] = sum(values) / made if joins.get(name, "sum") == "sum" else REDUCTIONS[joins[name]](values)
        return means | {f"{self.prefix}/skipped": float(skipped)}

    def _step(self, last: bool) -> dict[str, float]:
        """One optimizer step; `last`: it ends the update."""
        return self.engine.step(last and bool(self._idle), self.context.send_beside if last else None)

    @register(ALL_RANKS_FIRST_OUTPUT, binds=_optimizer_changes)
    def set_optimizer(
        self,
        *,
        lr: float | None = None,
        min_lr: float | None = None,
        weight_decay: float | None = None,
        clip_grad: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
    ) -> None:
        """Settings of the optimizer from the next update on; None leaves one as it is.

        Moments and step counts stay, and so do the lr and weight decay that `groups` have of their own. The schedule
        continues: it scales the new `lr` as it did the old one. Checkpoints keep what was changed, and a run that
        continues has it again. Errors: ConfigError for a value or setting that `hf.Adam` or `hf.SGD` refuses, and for a
        group that does not train.
        """
        given = {"lr": lr, "min_lr": min_lr, "weight_decay": weight_decay, "clip_grad": clip_grad}
        given |= {"betas": betas, "eps": eps}
        self.engine.change_optimizer({name: value for name, value in given.items() if value is not None})

    @register(ALL_RANKS_FIRST_OUTPUT, blocking=True, check=_check_save)
    def save(self, path: str | os.PathLike[str], merged: bool = False, dtype: DType | None = None) -> str:
        """Write a Hugging Face directory (safetensors, config, tokenizer) on a path that all ranks share, or at an
        address such as `s3://bucket/model`, to which rank 0 sends what all wrote to a staging directory; waits.

        Weights are the optimizer's float32 ones where training has 16 bits, in the dtypes of the files that the model
        came from; with `dtype` in that, but those that transformers keeps in float32 for the family. With LoRA the
        adapters are written in peft's format (float32, or `dtype`), or with `merged` the whole model. Returns the
        absolute path.

        Errors: CheckpointError, also for weights that are not finite or that `dtype` cannot hold, and after a
        DivergenceError; ConfigError for another dtype, and for a reward that is a function.
        """
        group, engine = self.context.groups.everyone(), self.engine
        if self._skipped.diverged:
            raise CheckpointError(
                f"{self.context.role} was not saved to {path}: it has diverged, and its last steps were all skipped. "
                f"Continue from an earlier checkpoint, with a lower lr."
            )
        rank = self.context.rank
        with written_here(path, sends=not rank) as target, self.resident():
            if engine.adapters is not None and not merged:
                engine.adapters.save(target, self.checkpoint, dtype)
                return str(path)
            self._merge()
            dtypes = saved_dtypes(self._dtypes, dtype, getattr(self.spec, "config", None))
            layout, storage = (self.optimizing_engine() or engine).exact_weights()
            save_checkpoint(target, layout, storage, like=self._beside, group=group, rank=rank, dtypes=dtypes)
        return str(path)

    @register(ONE_TO_ALL, blocking=True)
    def check_replicas(self) -> None:
        """Compare the weights of data parallel ranks, as every checkpoint of a trained group does.

        Errors: ReplicaError that names the tensor and the rank (`engines.replicas`)."""
        if self.has_tensors:
            with self.resident(PARAMETERS):
                check_replicas(self.context, self.engine)

    @register(ONE_TO_ALL, blocking=True)
    def memory(self) -> dict[str, float]:
        """GiB now in device memory on each rank: `memory/parameters` (of training), with an optimizer
        `memory/gradients` and `memory/optimizer` (what shares no memory with the parameters); for an actor
        `memory/generation` (its weights) and `memory/kv_cache`; on CUDA allocated memory and its peak."""
        found = self.resident_bytes()
        if self.context.device.type == "cuda":
            found |= {"allocated": MAPPED.now(), "peak": max(self.context.peak, MAPPED.peak())}
        return {f"memory/{name}": size / (1 << 30) for name, size in found.items()}

    def forward_flops(self, tokens: Tensor) -> float:
        """Floating point operations of a forward pass over sequences of these lengths."""
        return float(self.spec.cost(tokens).sum()) if self.has_tensors else 0.0

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of each kind of state now in device memory."""
        return self.engine.resident_bytes() if self.has_tensors else {}

    def image_bytes(self) -> int:
        """Bytes of the images of state in host memory."""
        return self.engine.image_bytes() if self.has_tensors else 0

    def sleep(self) -> None:
        """Free the memory of all state and drop its content, until `wake_up`. Process groups stay."""
        self.engine.release()
        self._writer = None  # has a copy of the last checkpoint

    def wake_up(self) -> None:
        """Allocate what `sleep` freed; state of other ranks is written there next."""
        self.engine.reload(STATES)

    def close(self) -> None:
        if self.has_tensors:
            self.engine.close()
