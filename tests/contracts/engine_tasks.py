"""What the processes of the train engine suite do: each function runs on every rank of a model group.

A backend is chosen by the type of its strategy, so the suite runs for every backend.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow import config
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.flat_shards import FlatShards
from hybridflow.engines.train_backends import build_engine
from hybridflow.engines.units import whole_units
from hybridflow.errors import CheckpointError
from hybridflow.models.hf_spec import read_spec
from hybridflow.topology import RankGrid
from tests.contracts.example_models import loss_of, make_batch
from tests.contracts.rank_processes import World


def build(
    world: World,
    name: str,
    strategy: Any,
    size: int,
    path: Path | None,
    head: str = "lm",
    optimizer: config.Optimizer | None = None,
    spec: Any = None,
    kept: bool = True,
) -> Any:
    """The engine of `strategy` on the first `size` processes, with the groups that are kept there or with its own.

    It computes in float32 unless the strategy names a dtype: as on the CPU, so on CUDA."""
    strategy = replace(strategy, dtype=strategy.dtype or "float32")
    context = world.context(name, strategy.grid(size), role="critic" if head == "value" else "actor", kept=kept)
    spec = spec or read_spec(path, head)  # type: ignore[arg-type]
    world.engines.append(build_engine(context, strategy, spec, path, optimizer))
    return world.engines[-1]


def share(batch: Batch, grid: RankGrid, rank: int, counts: Sequence[int] | None = None) -> Batch:
    """The rows of this rank's data parallel replica: `counts` rows each, or as even as can be."""
    counts = counts or [len(part) for part in torch.arange(batch.rows).tensor_split(grid.d)]
    d = grid.coords(rank).d
    return batch[sum(counts[:d]) : sum(counts[: d + 1])]


def boxes(
    engine: Any, tensors: Mapping[str, Tensor], layout: Layout | None = None
) -> list[tuple[str, tuple, tuple, Tensor]]:
    """This rank's regions of `tensors` (by storage name) with the canonical boxes they hold, of weights or `layout`."""
    regions = (layout or engine.layout()).regions(engine.context.rank)
    return [
        (r.box.tensor, r.box.start, r.box.stop, r.view(tensors[r.storage]).detach().float().clone()) for r in regions
    ]


def outputs(
    world: World, jobs: Sequence[tuple[str, Any, int, Path, str, float]], counts: Sequence[int] | None = None
) -> list[dict[str, Ragged | Tensor] | None]:
    """Every output of every job's model, on this rank's rows; None off the last stage."""
    found = []
    for name, strategy, size, path, head, temperature in jobs:
        engine = build(world, name, strategy, size, path, head)
        rows = share(make_batch(), engine.grid, world.rank, counts)
        names = ("values",) if head == "value" else ("entropy", "log_probs")
        out: dict[str, Any] | None = engine.forward(rows, names, temperature)
        if head == "value":
            scores = engine.score(rows)
            assert (scores is None) == (out is None)
            out = out and {**out, "scores": scores}
            token_scores = engine.score(rows, tokens=True)
            assert (token_scores is None) == (out is None)
            out = out and {**out, "token_scores": token_scores}
        found.append(out)
        engine.context.groups.close()
        engine.close()
    return found


def updates(
    world: World,
    name: str,
    strategy: Any,
    size: int,
    path: Path,
    head: str,
    optimizer: config.Optimizer,
    counts: Sequence[int] | None = None,
    steps: int = 2,
    changes: Mapping[int, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Updates: gradients of the first, norms, metrics and the parameters after them, as canonical boxes.

    `changes` are settings of the optimizer that change before a step."""
    engine = build(world, name, strategy, size, path, head, optimizer)
    loss = loss_of(head)
    found: dict[str, Any] = {"norms": [], "metrics": []}
    for step in range(steps):
        if changes and step in changes:
            engine.change_optimizer(changes[step])
        rows = share(make_batch(seed=step), engine.grid, world.rank, counts)
        found["metrics"].append(engine.forward_backward(rows, loss, loss.outputs))
        if step == 0:
            found["gradients"] = boxes(engine, engine.gradients())
        found["norms"].append(engine.step())
    found["parameters"] = boxes(engine, engine.storage())
    engine.context.groups.close()
    return found


def side_by_side(world: World, names: Sequence[str], jobs: Sequence[tuple], size: int) -> list[dict[str, Any]]:
    """Two models with different grids take turns in the same processes; Megatron's globals stay unset."""
    from megatron.core import parallel_state

    engines = [build(world, n, s, size, path, head, o) for n, (s, path, head, o) in zip(names, jobs, strict=True)]
    found: list[dict[str, Any]] = [{"norms": []} for _ in engines]
    for step in range(2):
        for engine, out, (_, _, head, _) in zip(engines, found, jobs, strict=True):
            loss = loss_of(head)
            engine.forward_backward(share(make_batch(seed=step), engine.grid, world.rank), loss, loss.outputs)
            out["norms"].append(engine.step())
    for engine, out in zip(engines, found, strict=True):
        out["parameters"] = boxes(engine, engine.storage())
        engine.context.groups.close()
    assert not parallel_state.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    return found


def several_passes(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> dict[str, Any]:
    """One update from two `forward_backward` calls, each on half of the rows with the whole batch's loss share."""
    engine = build(world, name, strategy, size, path, "lm", optimizer)
    rows = share(make_batch(), engine.grid, world.rank)
    for part in (rows[: rows.rows // 2], rows[rows.rows // 2 :]):
        engine.forward_backward(part, _sum_of_log_probs, ("log_probs",))
    gradients = boxes(engine, engine.gradients())
    norm = engine.step()["grad_norm"]
    engine.forward_backward(rows, _sum_of_log_probs, ("log_probs",))
    whole = boxes(engine, engine.gradients())
    engine.context.groups.close()
    return {"gradients": gradients, "whole": whole, "norm": norm}


def _sum_of_log_probs(found: Mapping[str, Ragged], rows: Batch, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return found["log_probs"].values.sum(), {}


def broken_gradients(output: Tensor) -> Tensor:
    """0, whose gradients are not finite."""
    return (output - output.detach()).abs().sqrt().sum()


def saved(engine: Any) -> dict[str, Any]:
    """Copies of what a checkpoint of this rank needs: trained parameters, every kind of optimizer state, counters."""
    trained = engine.storage() if engine.adapters is None else engine.adapters.storage
    kinds = {"parameters": trained, **engine.optimizer_storage()}
    copies = {kind: {name: t.detach().clone() for name, t in tensors.items()} for kind, tensors in kinds.items()}
    return {"tensors": copies, "counters": engine.optimizer_counters()}


def load_saved(engine: Any, state: Mapping[str, Any]) -> None:
    """Continue from `saved` of the same rank: everything is written into the engine's own storage."""
    trained = engine.storage() if engine.adapters is None else engine.adapters.storage
    for kind, tensors in {"parameters": trained, **engine.optimizer_storage()}.items():
        assert tensors.keys() == state["tensors"][kind].keys()
        for name, tensor in tensors.items():
            tensor.data.copy_(state["tensors"][kind][name])
    engine.optimizer_moved(state["counters"])


def resumed(
    world: World,
    name: str,
    strategy: Any,
    size: int,
    path: Path,
    optimizer: Any,
    tolerance: float = 0.0,
    changes: Mapping[str, Any] | None = None,
) -> bool:
    """What is saved after three updates is what is saved after resuming from the first; relative `tolerance`.

    `changes` of the optimizer's settings are made before the first update only."""
    loss, found, state = loss_of("lm"), [], None
    for again in (False, True):
        engine = build(world, f"{name}-{again}", strategy, size, path, "lm", optimizer)
        if again:
            load_saved(engine, state)  # type: ignore[arg-type]
        elif changes:
            engine.change_optimizer(changes)
        for seed in (1, 2) if again else (0, 1, 2):
            engine.forward_backward(share(make_batch(seed=seed), engine.grid, world.rank), loss, loss.outputs)
            engine.step()
            state = state or saved(engine)
        found.append(saved(engine))
        engine.context.groups.close()
        engine.close()
    pairs = [(found[0]["tensors"][k][n], t) for k, held in found[1]["tensors"].items() for n, t in held.items()]
    near = (float((one - other).norm()) <= tolerance * float(one.norm()) for one, other in pairs)
    return found[0]["counters"] == found[1]["counters"] and all(near)


def written_from_outside(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> bool:
    """Weights written into `storage()` are what the next update starts from, also in 16 bits."""
    engine = build(world, name, strategy, size, path, "lm", optimizer)
    for tensor in engine.storage().values():
        tensor.mul_(0.5)
    engine.weights_loaded()
    before = {n: t.clone() for n, t in engine.storage().items()}
    loss = loss_of("lm")
    engine.forward_backward(share(make_batch(), engine.grid, world.rank), loss, loss.outputs)
    engine.step()
    after = engine.storage()
    engine.context.groups.close()
    near = all(torch.allclose(after[n].float(), before[n].float(), atol=1e-2) for n in before)
    moved = any(not torch.equal(after[n], before[n]) for n in before)
    return near and moved


def fresh_weights(world: World, name: str, strategy: Any, size: int, spec: Any) -> list:
    """The weights of an engine that was given no checkpoint."""
    engine = build(world, name, strategy, size, None, spec.head, spec=spec)
    found = boxes(engine, engine.storage())
    engine.context.groups.close()
    return found


def vocabulary(world: World, name: str, size: int, temperature: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Vocab-parallel log-probabilities, entropy and this rank's gradient of a random function of both."""
    from hybridflow.engines.token_outputs import vocab_parallel_log_probs

    context = world.context(name, RankGrid(t=size))
    group = context.groups.new("t", range(size))
    logits, targets, weights = (value.to(world.device) for value in vocabulary_case(seed))
    columns = -(-logits.shape[1] // size)
    first = world.rank * columns
    mine = logits[:, first : first + columns].clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(mine, targets, first, group, temperature, entropy=True)
    assert entropy is not None
    (log_probs * weights[0] + entropy * weights[1]).sum().backward()
    context.groups.close()
    assert mine.grad is not None
    return log_probs.detach(), entropy.detach(), mine.grad


def vocabulary_case(seed: int, tokens: int = 9, columns: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """Logits far apart (one of them would overflow exp), targets, and weights of the two outputs."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, columns, generator=generator) * 4
    logits[0, 3], logits[1] = 300.0, -500.0
    targets = torch.randint(0, columns, (tokens,), generator=generator)
    return logits, targets, torch.randn(2, tokens, generator=generator)


def closed(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any, away: Sequence[str]) -> int:
    """Bytes behind tensors that a closed engine held, whoever still refers to them; Megatron's model is gone though the
    collector never sees it again, as in a process where vLLM froze it. `away` is in host memory when it closes."""
    engine = build(world, name, strategy, size, path, "lm", optimizer)
    held = [engine.storage()]
    if optimizer:
        loss, rows = loss_of("lm"), share(make_batch(), engine.grid, world.rank)
        engine.forward_backward(rows, loss, loss.outputs)
        engine.step()
        engine.forward_backward(rows, loss, loss.outputs)
        held += [getattr(engine._shards.gradients, "buffers", {}), *engine.optimizer_storage().values()]
    tensors = [tensor.detach() for kind in held for tensor in kind.values() if tensor.numel()]
    assert all(tensor.untyped_storage().nbytes() for tensor in tensors)
    engine.offload(away)
    left = [
        weakref.ref(part)
        for part in (engine._shards.model, engine._model.loop, engine._optimizer, engine._shards)
        if part and isinstance(strategy, config.Megatron)
    ]
    held.clear()
    gc.disable()
    try:
        engine.close()
        assert not any(ref() for ref in left)
    finally:
        gc.enable()
    engine.close()
    engine.context.groups.close()
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def left_by_a_failed_build(world: World, name: str, strategy: Any, nowhere: Path, spec: Any, optimizer: Any) -> int:
    """Models in this process after an engine did not find its checkpoint, without the collector's help."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    gc.collect()
    gc.disable()
    before = {id(found) for found in gc.get_objects() if isinstance(found, GPTModel)}
    try:
        build(world, name, strategy, 1, nowhere, "lm", optimizer, spec=spec)
        raise AssertionError("an engine was built from nothing")
    except CheckpointError:
        pass
    finally:
        gc.enable()
    return len({id(found) for found in gc.get_objects() if isinstance(found, GPTModel)} - before)


def fails(world: World, name: str, strategy: Any, size: int, path: Path, what: str) -> str:
    """The error of a call that must not work, as `ErrorClass: message`."""
    try:
        engine = build(world, name, strategy, size, path)
        if what == "values":
            engine.forward(make_batch(), ("values",))
        elif what == "train":
            engine.step()
        elif what == "prompt":
            empty = Ragged.from_rows([[], [1]], dtype=torch.int64)
            engine.forward(Batch({"prompt_ids": empty, "response_ids": empty}), ("log_probs",))
        elif what == "vocabulary":
            prompts, unknown = Ragged.from_rows([[1], [2]]), Ragged.from_rows([[3], [4, 61]])
            engine.forward(Batch({"prompt_ids": prompts, "response_ids": unknown}), ("log_probs",))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Branches(nn.Module):
    """Uses its layers from the last to the first, and `odd` only where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.odd = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return self.odd(x) if odd else x


def any_order(world: World, name: str, stage: int, overlap: bool) -> tuple[bool, list[str]]:
    """Layers that are used in another order, and one that only some ranks use: sums are those of one process, whether
    or not somebody looks at them in between."""
    model, alone = Branches().to(world.device), Branches().to(world.device)
    tensors = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    context = world.context(name, RankGrid(d=4))
    shards = FlatShards(context, model, whole_units(tensors), context.groups.everyone(), stage=stage, overlap=overlap)
    inputs = torch.randn(3, 4, 2, 8, generator=torch.Generator().manual_seed(1)).to(world.device)
    for number, inputs_of_pass in enumerate(inputs):
        shards.before_backward()
        model(inputs_of_pass[world.rank], odd=world.rank == 2).square().sum().backward()
        for rank, x in enumerate(inputs_of_pass):
            alone(x, odd=rank == 2).square().sum().backward()
        if number == 1:
            shards.after_pass()
            assert shards.gradients.tensors
    shards.after_pass()
    shards.reduce()
    expected: dict[str, Any] = {key: parameter.grad for key, parameter in alone.named_parameters()}
    found = shards.gradients.tensors
    same = all(torch.allclose(found[key], expected[key], rtol=1e-5, atol=1e-6) for key in tensors)
    kept = [key for key, parameter in model.named_parameters() if parameter.grad is not None]
    shards.close()
    context.groups.close()
    return same, kept
