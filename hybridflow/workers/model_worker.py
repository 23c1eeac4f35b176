"""Base of actor, critic, reference and reward model (paper, section 4.1): checkpoint, strategy, early checks."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from hybridflow.algorithms.losses.loss import Loss
from hybridflow.algorithms.masked import batch_temperature, not_finite
from hybridflow.algorithms.trajectories import Trajectories
from hybridflow.batch.batch import Batch
from hybridflow.config import DType, Megatron, Optimizer, TrainStrategy, is_strategy
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.agreement import REDUCTIONS, agree
from hybridflow.engines.call_events import MAPPED
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.checkpoint.writer import check_dtype, read_beside, save_checkpoint, saved_dtypes
from hybridflow.engines.contract import UNINITIALIZED, Output, TrainState
from hybridflow.engines.lora.adapters import CONFIG
from hybridflow.engines.skipped_steps import SkippedSteps
from hybridflow.engines.train_backends import backend, build_engine
from hybridflow.engines.train_engine import TrainEngine
from hybridflow.errors import BrokenGroupError, CheckpointError, ConfigError, PlacementError, add_outcome, rows_named
from hybridflow.models.hf_spec import Decoder, check_reading, read_spec, use_of
from hybridflow.models.spec import Cost, Head
from hybridflow.protocols.operation import OperationKind, Settings, register
from hybridflow.protocols.protocol import Protocol
from hybridflow.protocols.transfer_protocols import ONE_TO_ALL, ONE_TO_ONE
from hybridflow.settings import local_path, require
from hybridflow.topology import RankGrid
from hybridflow.workers.lora_options import check_lora, lora_of, with_saved_adapters
from hybridflow.workers.saved_state import FROZEN
from hybridflow.workers.worker import Worker

logger = logging.getLogger(__name__)
ALL_RANKS_FIRST_OUTPUT = Protocol("ALL_RANKS_FIRST_OUTPUT", ONE_TO_ALL.distribute, ONE_TO_ONE.collect)
"""All ranks compute together; rank 0 returns the result."""
_CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt", "*.tiktoken", "vocab*")
_CHECKPOINTS = ("model", "tokenizer", "teacher")  # settings that name a directory or hub model


def find_checkpoint(model: str | os.PathLike[str], files: Sequence[str] = _CHECKPOINT_FILES) -> Path:
    """The given directory, or the local snapshot of a hub name with these `files` (downloaded once). Errors:
    CheckpointError."""
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


def _check_save(settings: Settings, call: Any) -> None:
    if settings.get("model") is None:
        raise ConfigError("this worker calls a function: there is nothing to save.")
    check_dtype(call.get("dtype"))
    call["path"] = os.path.abspath(local_path(call["path"]))


class ModelWorker(Worker):
    """One rank of a sharded model as a `TrainEngine`."""

    head: ClassVar[Head] = "lm"
    _frozen: Mapping[str, str] = {}
    _dtypes: Mapping[str, str] = {}  # of the files of its model
    _idle: tuple[TrainState, ...] = ()  # kept in host memory between calls

    @classmethod
    def resolve(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Makes checkpoint paths absolute; hub models are downloaded here and become their snapshots' paths."""
        found = {name: settings[name] for name in _CHECKPOINTS if settings.get(name) is not None}
        paths = {name: str(find_checkpoint(path)) for name, path in found.items()}
        return with_saved_adapters({**settings, **paths}, find_checkpoint)

    @classmethod
    def grid(cls, devices: int, settings: Mapping[str, Any]) -> RankGrid:
        strategy = settings["train"]
        given = strategy.__name__ if isinstance(strategy, type) else repr(strategy)
        require(
            is_strategy(strategy),
            f"{cls.__name__}(train={given}): give a strategy such as hf.Megatron(tp=2), hf.FSDP() or hf.ZeRO(stage=2).",
        )
        try:
            return strategy.grid(devices)
        except PlacementError as error:
            raise PlacementError(f"{cls.role}: {error}") from None

    @classmethod
    def check(cls, grid: RankGrid, settings: Mapping[str, Any], device_type: str) -> None:
        """Check checkpoint, sizes and optimizer on the driver, from files' headers only."""
        spec = cls.model_spec(settings)
        backend(settings["train"], "layout").check(settings["train"], spec, grid, cls.role)
        check_reading(settings["model"], spec)
        Checkpoint(settings["model"]).check(spec)
        check_lora(spec, settings)
        good = isinstance(optimizer := settings.get("optim"), Optimizer | None)
        require(good, f"{cls.__name__}(optim={optimizer!r}): give hf.Adam(lr=...) or hf.SGD(lr=...).")
        cls.check_offload(settings)

    @classmethod
    def check_offload(cls, settings: Mapping[str, Any]) -> None:
        """A model is offloaded between calls as a whole or not at all. Errors: ConfigError."""
        good = type(offload := settings.get("offload", False)) is bool
        require(good, f"{cls.__name__}(offload={offload!r}): the {cls.role} waits as a whole, give True or False.")

    @classmethod
    def model_spec(cls, settings: Mapping[str, Any]) -> Decoder:
        """Errors: CheckpointError, ModelError for a model that the strategy does not support."""
        return read_spec(settings["model"], cls.head, settings["train"])

    @classmethod
    def token_cost(cls, settings: Mapping[str, Any]) -> Cost | None:
        """Includes attention, whose cost is quadratic in a row's tokens."""
        return None if settings.get("model") is None else cls.model_spec(settings).cost

    @classmethod
    def weights_layout(cls, settings: Mapping[str, Any], grid: RankGrid) -> Layout:
        if settings.get("model") is None:
            raise ConfigError(f"this {cls.role} is a function: it has no weights that could be moved.")
        train = settings["train"]
        return backend(train, "layout").weights_layout(train, cls.model_spec(settings), grid)

    @classmethod
    def shares_stages(cls, settings: Mapping[str, Any], grid: RankGrid) -> bool:
        return grid.p > 1 and isinstance(settings.get("train"), Megatron) and settings.get("optim") is not None

    @classmethod
    def replica(cls, kind: OperationKind, settings: Mapping[str, Any]) -> tuple[type, dict[str, Any]] | None:
        """Ranks of this class that do not train; offloaded between calls if the class supports it."""
        if kind in ("training", "generation") or settings.get("model") is None or lora_of(settings) is not None:
            return None
        idle = {"optim": None, "offload": True}
        return cls, {**settings, **{name: value for name, value in idle.items() if name in settings}}

    @classmethod
    def check_written(cls, settings: Mapping[str, Any]) -> None:
        require(
            lora_of(settings) is None,
            f"{cls.__name__} trains adapters of the weights in {settings['model']}: these cannot be replaced or laid "
            f"out anew. Save it and place another group with model= that directory.",
        )

    def weights_storage(self) -> Mapping[str, Tensor]:
        self.engine.reload(self._idle)
        self._merge()
        return self.engine.storage()

    def _merge(self) -> None:
        """Merge adapters into the engine's storage until the current call ends."""
        if self.engine.adapters is not None:
            self.engine.adapters.merge()

    def _restore(self) -> None:
        if self.engine.adapters is not None:
            self.engine.adapters.restore()

    def on_weights_loaded(self) -> None:
        self.engine.weights_loaded()

    @property
    def has_tensors(self) -> bool:
        return getattr(self, "engine", None) is not None  # a reward function has none

    def use(self) -> Mapping[str, Any]:
        if (engine := getattr(self, "engine", None)) is None:
            return {}
        lora = None if engine.adapters is None else engine.adapters.lora
        own = {} if lora is None else {"lora_alpha": lora.alpha, "lora_rank": lora.rank}
        return {**use_of(self.spec), **own, **self._frozen}

    def beside(self) -> Mapping[str, bytes]:
        engine = getattr(self, "engine", None)
        if engine is None or engine.adapters is None:
            return getattr(self, "_beside", {})
        return {CONFIG: engine.adapters.config(self.checkpoint)}

    def file_dtypes(self) -> Mapping[str, str]:
        if (engine := getattr(self, "engine", None)) is None or engine.adapters is not None:
            return {}  # adapters: float32
        return self._dtypes

    def optimizing_engine(self) -> TrainEngine | None:
        self.engine.reload(self._idle)
        return self.engine if self.engine.optimizer_layout() is not None else None

    def _build(
        self, model: str | os.PathLike[str], train: TrainStrategy, optim: Optimizer | None, offload: bool = False
    ) -> None:
        self.checkpoint = local_checkpoint(model)
        # the directory may be gone when `save` runs
        self._beside = read_beside(self.checkpoint) if self.context.rank == 0 else {}
        self.spec = read_spec(self.checkpoint, self.head, train)
        self._dtypes = Checkpoint(self.checkpoint).dtypes(self.spec.tensors())
        frozen = self.context.rank == 0 and (optim is None or getattr(train, "lora", None) is not None)
        self._frozen = {FROZEN: Checkpoint(self.checkpoint).fingerprint()} if frozen else {}
        weights = UNINITIALIZED if self.context.uninitialized else self.checkpoint
        self._skipped = SkippedSteps(self.context, optim)
        self.engine = build_engine(self.context, train, self.spec, weights, optim)
        if offload:
            self._idle = ("parameters",) if optim is None else ("parameters", "optimizer", "gradients")
            self.engine.offload(self._idle)

    @property
    def prefix(self) -> str:
        """Prefix of its metric names."""
        return self.role

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Keeps the model's state for a call in device memory; offloads an idle model afterwards."""
        try:
            if self._idle:
                agree(self.context, partial(self.engine.reload, self._idle))
            yield
        except BaseException:
            with suppress(BrokenGroupError):  # what is raised says why
                self._rest()
            raise
        self._rest()

    def _rest(self) -> None:
        self._restore()
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
        with self.resident():
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
                    add_outcome(
                        error,
                        f"It was mini-batch {number} of {len(minibatches)}: the weights are those after "
                        f"the {number - 1 - skipped} optimizer steps before it.",
                    )
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
        return self.engine.step()

    @register(ALL_RANKS_FIRST_OUTPUT, blocking=True, check=_check_save)
    def save(self, path: str | os.PathLike[str], merged: bool = False, dtype: DType | None = None) -> str:
        """Write a Hugging Face directory (safetensors, config, tokenizer) on a path that all ranks share; waits.

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
        with self.resident():
            if engine.adapters is not None and not merged:
                engine.adapters.save(path, self.checkpoint, dtype)
                return str(path)
            self._merge()
            dtypes = saved_dtypes(self._dtypes, dtype, getattr(self.spec, "config", None))
            (layout, storage), rank = engine.exact_weights(), self.context.rank
            save_checkpoint(path, layout, storage, like=self._beside, group=group, rank=rank, dtypes=dtypes)
        return str(path)

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
        spec = getattr(self, "spec", None)  # a reward function has none
        return 0.0 if spec is None else float(spec.cost(tokens).sum())

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of each kind of state now in device memory."""
        engine = getattr(self, "engine", None)  # a reward function has no engine
        return {} if engine is None else engine.resident_bytes()

    def close(self) -> None:
        if (close := getattr(getattr(self, "engine", None), "close", None)) is not None:
            close()
