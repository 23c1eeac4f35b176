"""What vLLM generates after its weights were moved there equals what a fresh vLLM generates from their checkpoint.

Two models of equal sizes and different weights are trained in the same processes: one by Megatron, one by torch with
FSDP2 around transformers' own model. For each of several generation sizes (p_g, t_g) an engine starts, reads one
model's exported checkpoint, generates, is given the other model's weights by a transition, and generates again; the
next engine does it the other way around. So each model's outputs exist twice, and a left-over of either shows. vLLM
with its own loader, in a process that knows nothing of us, says what both should be.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.algorithms.registry import policy_loss
from hybridflow.config import VLLM, Adam, Megatron, Sampling
from hybridflow.engine3d.hybrid_engine import HybridEngine
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.transfer.transfer import execute
from hybridflow.engines.checkpoint.reader import SINGLE, Checkpoint
from hybridflow.engines.checkpoint.writer import save_checkpoint
from hybridflow.engines.process_groups import RankContext
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests.contracts.rank_processes import RankProcesses, World
from tests.tiny_models import make_policy, make_rows

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 33, 49], [12, 7], [3, 3, 40, 41, 42, 8], [30]]
TOKENS = 8
STEPS, WORLD = 3, 4

# Megatron's sizes are (p, t, d), torch's mesh (replicate, shard, tp)
MODELS: dict[str, tuple[int, int, int]] = {
    "megatron-1-4-1": (1, 4, 1),
    "megatron-2-2-1-tied": (2, 2, 1),
    "fsdp-2-tp-2": (1, 2, 2),
    "hsdp-2-2-tied": (2, 2, 1),
}
# name: (a model of either kind, p_g, t_g); one generation replica takes one to four ranks
CASES = {
    "p1t1": ("megatron-1-4-1", "fsdp-2-tp-2", 1, 1),
    "p1t4": ("megatron-1-4-1", "fsdp-2-tp-2", 1, 4),
    "p2t2": ("megatron-2-2-1-tied", "hsdp-2-2-tied", 2, 2),
}
Outputs = list[tuple[list[int], list[float]]]  # per prompt: token ids, log-probabilities
HELD: dict[str, Any] = {}  # in each process: the trained models


def train(world: World, group: str, name: str, root: Path) -> None:
    """Train `name` on its ranks, export it to `root / name`, and keep it."""
    sizes, source = MODELS[name], root / ("tied" if name.endswith("tied") else "untied")
    megatron = name.startswith("megatron")
    context = world.context(group, RankGrid(*sizes) if megatron else RankGrid(d=math.prod(sizes)))
    HELD[name] = (with_megatron if megatron else with_torch)(context, sizes, source, root / name)


def with_megatron(context: RankContext, sizes: tuple[int, int, int], source: Path, target: Path) -> Any:
    from hybridflow.engines.train_backends import build_engine

    strategy, optimizer = Megatron(tp=sizes[1], pp=sizes[0]), Adam(lr=0.02, weight_decay=0.0)
    engine = build_engine(context, strategy, ModelSpec.from_checkpoint(source), source, optimizer)
    loss = policy_loss("ppo")
    for seed in range(STEPS):
        engine.forward_backward(make_rows(seed=seed), loss, loss.outputs)
        engine.step()
    group = context.groups.everyone()
    save_checkpoint(target, engine.layout(), engine.storage(), like=source, group=group, rank=context.rank)
    return engine


def with_torch(context: RankContext, sizes: tuple[int, int, int], source: Path, target: Path) -> Any:
    """A transformers model under FSDP2, exported by torch's own gathering."""
    from transformers import AutoModelForCausalLM

    from hybridflow.engines.fsdp.sharded import make_mesh
    from tests.fsdp_models import wrap

    model: Any = wrap(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), make_mesh(context, sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0, foreach=False)
    ids = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(context.rank // sizes[2]))
    for _ in range(STEPS):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    if context.rank == 0:
        shutil.copytree(source, target)
        save_file(whole, target / SINGLE, metadata={"format": "pt"})
    return model


def generate(world: World, group: str, case: str, fresh: str, moved: str, root: Path) -> dict[str, Outputs]:
    """Outputs of a new engine with the checkpoint of `fresh`, and then with the weights of the live model `moved`."""
    from hybridflow.engines.vllm.engine import VLLMEngine

    megatron, _, p_g, t_g = CASES[case]
    context, spec = world.context(group, RankGrid(*MODELS[megatron])), ModelSpec.from_checkpoint(root / fresh)
    strategy = VLLM(tp=t_g, pp=p_g, kv_cache_gb=0.02, max_sequences=8)
    engine = VLLMEngine(context, strategy, context.grid.generation(p_g, t_g), spec, root / fresh)
    try:
        Checkpoint(root / fresh).read_into(engine.layout(), context.rank, engine.storage())
        engine.weights_changed()
        out = {fresh: greedy(engine)}
        if moved == megatron:
            hybrid = HybridEngine(HELD[moved], engine, context.groups.everyone(), context.rank)
            hybrid.to_generation()
            out[moved] = greedy(engine)
            hybrid.to_training()
        else:
            move_from_torch(HELD[moved], engine, spec, context)
            out[moved] = greedy(engine)
        return out
    finally:
        engine.close()
        context.groups.close()


def move_from_torch(model: Any, engine: Any, spec: ModelSpec, context: RankContext) -> None:
    from tests.dtensor_layouts import dtensor_layout, dtensor_storage

    weights = plan(dtensor_layout(model, spec=spec), engine.layout(), rank=context.rank)
    execute(weights, dtensor_storage(model), engine.storage(), context.groups.everyone(), context.rank)
    engine.weights_changed()


def greedy(engine: Any) -> Outputs:
    rows = engine.generate(PROMPTS, Sampling(max_tokens=TOKENS, greedy=True, ignore_eos=True))
    return [(row[0].token_ids, row[0].log_probs) for row in rows]


def vllm_itself(directories: list[str]) -> list[Outputs]:
    """What vLLM alone gives for Hugging Face directories: its front end, its loader, its kernels, its sampler."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    found = []
    for path in directories:
        model = LLM(
            path, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=8
        )
        asked = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
        rows: Outputs = []
        for answer in model.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False):
            ids = list(answer.outputs[0].token_ids)
            steps = answer.outputs[0].logprobs or []
            rows.append((ids, [step[token].logprob for step, token in zip(steps, ids, strict=True)]))
        found.append(rows)
        model.llm_engine.engine_core.shutdown()
        del model
        cleanup_dist_env_and_memory()
    return found


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(vllm_itself(sys.argv[1:])))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RankProcesses, Path]]:
    """Processes that hold the trained models, and the directory with their checkpoints."""
    root = tmp_path_factory.mktemp("weights")
    for kind in ("tied", "untied"):
        make_policy(root / kind, tokenizer=False, tie_word_embeddings=kind == "tied")
    processes = RankProcesses(WORLD)
    for name, sizes in MODELS.items():
        processes.run(math.prod(sizes), train, processes.name(), name, root)
    yield processes, root
    processes.close()


@pytest.fixture(scope="module")
def alone(trained) -> dict[str, Outputs]:
    """vLLM's own answers for every exported checkpoint."""
    _, root = trained
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, *(str(root / name) for name in MODELS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(MODELS, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_moved_weights_generate_as_a_fresh_engine_does(trained, alone, case):
    processes, root = trained
    one, other, _, _ = CASES[case]
    ranks = math.prod(MODELS[one])
    first = processes.run(ranks, generate, processes.name(), case, one, other, root)
    second = processes.run(ranks, generate, processes.name(), case, other, one, root)
    for a, b in zip(first, second, strict=True):
        assert a == b  # bit for bit: the same kernels, once on loaded and once on moved weights
        assert [ids for ids, _ in a[one]] != [ids for ids, _ in a[other]]
        for name in (one, other):
            for (ids, log_probs), (alone_ids, alone_log_probs) in zip(a[name], alone[name], strict=True):
                assert ids == alone_ids
                assert log_probs == pytest.approx(alone_log_probs, abs=1e-5)
