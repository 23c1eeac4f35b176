"""Worker: base of the classes that are placed on a pool: one rank, with weights and state that may move or be saved.

save: snapshot of the rank's boxes (in call order) -> a thread writes them   load: boxes of any layout -> this one
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.state_images import ImageHead, Part, StateImage
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.agreement import agree
from hybridflow.engines.checkpoint.manifest import FREEZE, FileEntry, SavedGroup, beside_name, check_content
from hybridflow.engines.checkpoint.rank_state import (
    Kinds,
    RankFile,
    SavedTensors,
    StateWriter,
    random_state,
    report_file,
    set_random_state,
)
from hybridflow.engines.contract import STATES, TrainState
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.replicas import INTEGERS, check_replicas
from hybridflow.engines.train_engine import TrainEngine
from hybridflow.engines.worker_spec import WorkerSpec, spec_of
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.placement import GroupPlacement
from hybridflow.protocols.operation import Settings
from hybridflow.workers.placing import place

WEIGHTS = "weights"
FROZEN = "frozen weights"
"""Key of `use`: a fingerprint of weights that training leaves alone."""


@dataclass(frozen=True)
class TrainingState:
    """An optimizer's state: tensors of each of `kinds` in `layout`, and `counters`."""

    layout: Layout
    kinds: tuple[str, ...]
    counters: dict[str, Any]


def rank_file(folder: str, rank: int) -> str:
    """The path of a rank's tensors in a checkpoint; `folder` is that of its group."""
    return f"{folder}/rank-{rank:05d}.safetensors"


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: any value, in dtypes that numpy lacks too."""
    return tensor.detach().view(INTEGERS[tensor.itemsize])


def has_state(part: Any) -> bool:
    """Whether an object, or a class, has `state()` and `load_state(state)`."""
    return callable(getattr(part, "state", None)) and callable(getattr(part, "load_state", None))


class Worker:
    """One rank of a group. Methods marked with `@register` are the group's operations.

    `self.context` (rank, grid, coordinates, device, process groups) is set before `__init__` runs.
    """

    role: ClassVar[str] = "worker"
    context: RankContext
    _skipped: Any = None  # a model's SkippedSteps
    _writer: StateWriter | None = None
    _weights: Layout | None = None
    _loads = 0  # checkpoints and images of which it has begun to read weights

    @classmethod
    def on(cls, pool: ResourcePool | GroupPlacement, *, name: str | None = None, **settings: Any) -> WorkerGroup:
        """Place this worker on every device of a pool or slice, or by a placement (`placement["actor"]`): on its
        devices, with its sizes in `train` and `generate`. Errors: ConfigError, PlacementError, WorkerError."""
        return place(cls, pool, name=name, **settings)

    @classmethod
    def worker_spec(cls, settings: Settings) -> WorkerSpec:
        """What the class says on the driver about a group with these settings: its grid, checks and weights."""
        return WorkerSpec()

    @contextmanager
    def resident(self, what: Collection[TrainState] = STATES) -> Iterator[None]:
        """Keeps these parts of a model's state for a call in device memory. May be collective over the group."""
        yield

    # Weights that move to other ranks (hf.sync_weights, hf.reallocate)

    def runtime_layout(self) -> Layout:
        """The complete layout, as found on a built rank, where that of `WorkerSpec.layout` is not."""
        raise ConfigError(f"the settings of {type(self).__name__} say where its weights lie.")

    def weights_storage(self) -> Mapping[str, Tensor]:
        """This rank's weights by the names of `WorkerSpec.layout`: the same tensors every time.

        Called within `resident`, on every rank of the group, before weights are read or written.
        """
        raise ConfigError(f"{type(self).__name__} has no weights that could be moved.")

    def on_weights_loaded(self) -> None:
        """Called after a transfer has written all of `weights_storage`: state derived from the old weights is stale."""

    def fixed_weights(self: Any) -> tuple[frozenset[str], Any]:
        """Canonical tensors that stay until something outside of this rank's calls writes or drops them, and a value
        that is another one then: `hf.sync_weights` moves them once between two groups that have them. None where a
        class of the user's own has other weights, or changes those that arrive."""
        own = type(self).on_weights_loaded, type(self).weights_storage
        asked = getattr(getattr(self, "engine", None), "fixed_weights", None)
        if asked is None or not self.has_tensors or not all(one.__module__.startswith("hybridflow.") for one in own):
            return frozenset[str](), None
        tensors, mark = asked()
        return tensors, (mark, self._loads)

    def while_waiting(self, waits: Callable[[], bool]) -> bool:
        """Called before weights arrive: work that the group can do as long as `waits()`. Returns whether it had any."""
        return False

    # Training state that moves to other ranks (hf.reallocate, GroupSizes)

    def optimizing_engine(self) -> TrainEngine | None:
        """The engine that holds the weights' optimizer state, within `resident`; None without training."""
        return None

    def open_generation(self) -> None:
        """Build the process's one generation engine. Collective; `__init__` does it unless `context.uninitialized`."""

    def close_generation(self) -> None:
        """Free the process's one generation engine, so that ranks of a new layout can build theirs."""

    def training_state(self) -> TrainingState | None:
        """The optimizer's state kinds and counters, equal on all ranks and returned by rank 0; None without an
        optimizer."""
        with self.resident():
            engine = self.optimizing_engine()
            layout = None if engine is None else engine.optimizer_layout()
            if engine is None or layout is None or self.context.rank:
                return None
            skipped = {} if self._skipped is None else {"skipped": self._skipped.streak}
            return TrainingState(layout, tuple(engine.optimizer_storage()), engine.optimizer_counters() | skipped)

    def training_state_arrived(self, counters: dict[str, Any]) -> None:
        """Called after the state was written: restores counters and weights."""
        with self.resident():
            if (engine := self.optimizing_engine()) is not None:
                engine.optimizer_moved(counters)
        if self._skipped is not None:
            self._skipped.streak = counters.get("skipped", 0)

    def step_aside(self) -> None:
        """Free the process's one generation engine; on a GPU, offload the training state."""
        self.close_generation()
        if self.context.device.type == "cuda":
            with self.resident():
                engine = self.optimizing_engine()
            if engine is not None:
                engine.offload(STATES)

    def step_back(self) -> None:
        """Undo `step_aside`, even if it was interrupted."""
        self.close_generation()
        if self.context.device.type == "cuda":
            with self.resident():  # leaving it offloads an idle model
                if (engine := self.optimizing_engine()) is not None:
                    engine.reload(STATES)
        self.open_generation()

    # Its part of a run's checkpoint

    @property
    def has_tensors(self) -> bool:
        """Whether it has weights or an optimizer's state."""
        return False

    def write_checkpoint(
        self: Any, directory: str, folder: str, id: str, settings: Mapping[str, Any] | None
    ) -> SavedGroup:
        """Take a snapshot and begin to write it to an unfinished checkpoint: the optimizer's state, or with `settings`
        the weights of a group that does not train. Returns the group's entry, without files.

        Errors: CheckpointError while the snapshot before is still being written; ReplicaError, see `check_replicas`.
        """
        rank, root = self.context.rank, Path(directory)
        if self._writer is None:
            self._writer = StateWriter(rank, self.context.device)
        with self.resident() if self.has_tensors else nullcontext():
            kinds, counters = self._kinds(settings)
            if counters is not None and (engine := self.optimizing_engine()) is not None:
                check_replicas(self.context, engine)
            beside = {f"{folder}/{beside_name(name)}": content for name, content in self.beside().items()}
            extra = {root / name: content for name, content in beside.items()} if not rank else {}
            file = RankFile(root / rank_file(folder, rank), report_file(root, folder, rank), id, extra)
            self._writer.save(file, kinds)
        layout = next((layout for layout, _ in kinds.values()), None)
        return SavedGroup(
            worker=type(self).__name__,
            kinds=tuple(kinds),
            tensors={} if layout is None or rank else {name: tuple(shape) for name, shape in layout.tensors.items()},
            counters=counters,
            dtypes={} if layout is None or rank else self.file_dtypes(),
            beside=tuple(beside) if kinds else (),
            values=(self.state(),) if has_state(self) else None,
            use=self.use(),
        )

    def _kinds(self, settings: Mapping[str, Any] | None) -> tuple[Kinds, dict[str, Any] | None]:
        engine = self.optimizing_engine() if self.has_tensors else None
        layout = None if engine is None else engine.optimizer_layout()
        if engine is not None and layout is not None:
            storages = engine.optimizer_storage().items()
            return {kind: (layout, tensors) for kind, tensors in storages}, engine.optimizer_counters()
        if settings is None or not self.has_tensors:
            return {}, None
        return {WEIGHTS: (self._weights_layout(settings), self.weights_storage())}, None

    def image(self: Any, settings: Mapping[str, Any] | None, tensors: bool) -> tuple[StateImage, ImageHead]:
        """What a checkpoint would have of this rank, with `tensors` if its group has any of them."""
        with self.resident() if tensors else nullcontext():
            kinds, counters = self._kinds(settings) if tensors else ({}, None)
            arrays = {  # of copies: memory that numpy has seen cannot be released
                (kind, region.box): _bits(region.view(storage[region.storage])).to("cpu", copy=True).numpy()
                for kind, (layout, storage) in kinds.items()
                for region in layout.regions(self.context.rank)
            }
        size, values = sum(array.nbytes for array in arrays.values()), (self.state(),) if has_state(self) else None
        return StateImage(arrays), ImageHead(size, counters, random=random_state(), values=values)

    def state_layout(self: Any, settings: Mapping[str, Any] | None) -> Layout | None:
        """The layout of what an image has, returned by rank 0."""
        with self.resident() if self.has_tensors else nullcontext():
            kinds, _ = self._kinds(settings)
            return None if self.context.rank else next((layout for layout, _ in kinds.values()), None)

    def take_image(
        self: Any, settings: Any, tensors: bool, head: ImageHead, parts: Sequence[Part] | None, *images: Any
    ) -> None:
        """Fill this rank's state from `parts` of images (None: all of its own) and the head of its own. Collective.
        Errors: CheckpointError for an image that is lost."""

        def fill() -> None:
            self._loads += 1
            if not all(isinstance(image, StateImage) for image in images):
                raise CheckpointError(f"an image of {self.context.role} was lost with its machine.")
            for kind, (layout, storage) in self._kinds(settings)[0].items() if tensors else ():
                own = ((region.box, region.box, (region,), 0) for region in layout.regions(self.context.rank))
                for box, whole, regions, image in own if parts is None else parts:
                    ends = zip(box.start, box.stop, whole.start, strict=True)
                    array = images[image].arrays[kind, whole][tuple(slice(a - at, b - at) for a, b, at in ends)]
                    for region in regions:
                        _bits(region.view(storage[region.storage], box)).copy_(torch.tensor(array))

        with self.resident() if tensors else nullcontext():
            agree(self.context, fill, "the images")
            set_random_state(head.random, "an image")
            if head.values is not None:
                self.load_state(head.values[0])
            if tensors:
                self._restored(head.counters)

    def _restored(self: Any, counters: Mapping[str, Any] | None) -> None:
        if (engine := self.optimizing_engine()) is not None:
            engine.optimizer_moved(counters)
            self.on_state_loaded()
        else:
            self.on_weights_loaded()

    def _weights_layout(self, settings: Mapping[str, Any]) -> Layout:
        if self._weights is None:
            layout_of = spec_of(type(self), settings).layout
            assert layout_of is not None  # it has tensors
            layout = layout_of(self.context.grid)
            self._weights = layout if layout.complete else self.runtime_layout()
        return self._weights

    def use(self) -> Mapping[str, Any]:
        """Settings by which the model computes from its tensors, as plain data, and what identifies frozen weights
        that a checkpoint does not have."""
        return {}

    def beside(self) -> Mapping[str, bytes]:
        """Files that an exported model has beside its weights, by name."""
        return {}

    def file_dtypes(self) -> Mapping[str, str]:
        """The dtypes that an export has by default, by tensor, as safetensors spells them."""
        return {}

    def damaged_files(self, directory: str, files: Mapping[str, FileEntry]) -> list[str]:
        """Read files of a checkpoint; what is wrong with those that do not have their checksums."""
        found = []
        for name, entry in files.items():
            try:
                check_content(Path(directory), name, entry)
            except CheckpointError as error:
                found.append(str(error))
        return found

    def read_checkpoint(
        self: Any, directory: str, id: str, saved: SavedGroup, names: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        """Fill the optimizer's state, or the weights, from the boxes of a checkpoint; with the same number of ranks,
        continue the random number generators. Collective.

        Errors: CheckpointError, on all ranks, for another model or optimizer.
        """
        files = [Path(directory) / name for name in names]
        with self.resident() if self.has_tensors else nullcontext():
            agree(self.context, lambda: self._read(files, id, saved, settings), "the checkpoint")
            if saved.values is not None and has_state(self):
                self.load_state(saved.values[self.context.rank])
            if saved.kinds:
                self._restored(saved.counters)

    def _read(self: Any, files: Sequence[Path], id: str, saved: SavedGroup, settings: Mapping[str, Any]) -> None:
        self._check_use(saved)
        self._loads += 1
        tensors, rank = SavedTensors(files, id), self.context.rank
        engine = self.optimizing_engine() if self.has_tensors else None
        if engine is not None:
            layout, storages = engine.optimizer_layout(), engine.optimizer_storage()
            if set(storages) != set(saved.kinds):
                raise CheckpointError(
                    f"{self.context.role} keeps {sorted(storages)} of its optimizer or average, the checkpoint has "
                    f"{sorted(saved.kinds)}: give the optimizer (of a reference, the ema_decay) of the saved run."
                )
            self._check_tensors(saved, layout)
            for kind, storage in storages.items():
                tensors.read_into(kind, layout.regions(rank), storage)
        elif saved.kinds:
            kind, layout = WEIGHTS if WEIGHTS in saved.kinds else "main", self._weights_layout(settings)
            self._check_tensors(saved, layout)
            tensors.read_into(kind, layout.regions(rank), self.weights_storage())
        if len(files) == self.context.grid.size:
            tensors.restore_random_state(rank)

    def _check_use(self, saved: SavedGroup) -> None:
        here = self.use()
        for name in here.keys() & saved.use.keys():
            whole = saved.kinds and not here.keys() & {"lora_alpha", FREEZE}  # the checkpoint has all weights
            if here[name] == saved.use[name] or (name == FROZEN and whole):
                continue
            if name == FROZEN:
                why = f"the frozen weights of {self.context.role} are not those that the checkpoint was made with"
            else:
                why = f"{name} is {saved.use[name]} in the checkpoint of {self.context.role} and {here[name]} here"
            raise CheckpointError(
                f"{why}: the model would compute something else. Give the model and the settings of the saved run."
            )

    def _check_tensors(self, saved: SavedGroup, layout: Layout) -> None:
        here = {name: tuple(shape) for name, shape in layout.tensors.items()}
        there = dict(saved.tensors)
        if differing := [name for name in {**here, **there} if here.get(name) != there.get(name)]:
            name = differing[0]
            raise CheckpointError(
                f"the checkpoint of {self.context.role} is of another model: {len(differing)} tensors differ, the "
                f"first is {name}, {there.get(name, 'none')} in the checkpoint and {here.get(name, 'none')} here."
            )

    def on_state_loaded(self) -> None:
        """Called after the optimizer's state and the parameters were loaded."""
