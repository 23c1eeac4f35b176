"""What vLLM generates after its weights were moved there equals what a fresh vLLM generates from their checkpoint.

Two models of equal sizes and different weights are trained in the same processes, by engines of different kinds. For
each of several generation sizes (p_g, t_g) an engine starts, reads one model's checkpoint, generates, is given the
other model's weights by a transition, and generates again; the next engine does it the other way around. So each
model's outputs exist twice, and a left-over of either shows. vLLM with its own loader, in a process of its own,
says what both should be.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridflow.algorithms.registry import policy_loss
from hybridflow.config import FSDP, VLLM, Adam, Megatron, Sampling, ZeRO
from hybridflow.engine3d.hybrid_engine import HybridEngine
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.checkpoint.writer import save_checkpoint
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests.contracts.rank_processes import RankProcesses, World
from tests.tiny_models import make_policy, make_rows

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 33, 49], [12, 7], [3, 3, 40, 41, 42, 8], [30]]
TOKENS = 8
STEPS, WORLD = 3, 4

# sizes (p, t, d), and what trains
MODELS: dict[str, tuple[tuple[int, int, int], Megatron | FSDP | ZeRO]] = {
    "megatron-1-4-1": ((1, 4, 1), Megatron(tp=4)),
    "megatron-2-2-1-tied": ((2, 2, 1), Megatron(pp=2, tp=2)),
    "fsdp-1-2-2": ((1, 2, 2), FSDP(tp=2)),
    "zero-1-1-4-tied": ((1, 1, 4), ZeRO(stage=3)),
}
# name: (a model of either kind, p_g, t_g); one generation replica takes one to four ranks
CASES = {
    "p1t1": ("megatron-1-4-1", "fsdp-1-2-2", 1, 1),
    "p1t4": ("megatron-1-4-1", "fsdp-1-2-2", 1, 4),
    "p2t2": ("megatron-2-2-1-tied", "zero-1-1-4-tied", 2, 2),
}
Outputs = list[tuple[list[int], list[float]]]  # per prompt: token ids, log-probabilities
HELD: dict[str, Any] = {}  # in each process: the trained models


def train(world: World, group: str, name: str, root: Path) -> None:
    """Train `name` on its ranks, save it to `root / name`, and keep it."""
    from hybridflow.engines.train_backends import build_engine

    (sizes, strategy), source = MODELS[name], root / ("tied" if name.endswith("tied") else "untied")
    context, optimizer = world.context(group, RankGrid(*sizes)), Adam(lr=0.02, weight_decay=0.0)
    engine = build_engine(context, strategy, ModelSpec.from_checkpoint(source), source, optimizer)
    loss = policy_loss("ppo")
    for seed in range(STEPS):
        engine.forward_backward(make_rows(seed=seed + 10 * sizes[2]), loss, loss.outputs)
        engine.step()
    everyone = context.groups.everyone()
    save_checkpoint(root / name, engine.layout(), engine.storage(), like=source, group=everyone, rank=context.rank)
    HELD[name] = engine


def generate(world: World, group: str, case: str, fresh: str, moved: str, root: Path) -> dict[str, Outputs]:
    """Outputs of a new engine with the checkpoint of `fresh`, and then with the weights of the live model `moved`."""
    from hybridflow.engines.vllm.engine import VLLMEngine

    megatron, _, p_g, t_g = CASES[case]
    context, spec = world.context(group, RankGrid(*MODELS[megatron][0])), ModelSpec.from_checkpoint(root / fresh)
    strategy = VLLM(tp=t_g, pp=p_g, kv_cache_gb=0.02, max_sequences=8)
    engine = VLLMEngine(context, strategy, context.grid.generation(p_g, t_g), spec, root / fresh)
    try:
        Checkpoint(root / fresh).read_into(engine.layout(), context.rank, engine.storage())
        engine.weights_changed()
        out = {fresh: greedy(engine)}
        hybrid = HybridEngine(HELD[moved], engine, context.groups.everyone(), context.rank)
        hybrid.to_generation()
        out[moved] = greedy(engine)
        hybrid.to_training()
        return out
    finally:
        engine.close()
        context.groups.close()


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
    for name, (sizes, _) in MODELS.items():
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
    ranks = math.prod(MODELS[one][0])
    first = processes.run(ranks, generate, processes.name(), case, one, other, root)
    second = processes.run(ranks, generate, processes.name(), case, other, one, root)
    for a, b in zip(first, second, strict=True):
        assert a == b  # bit for bit: the same kernels, once on loaded and once on moved weights
        assert [ids for ids, _ in a[one]] != [ids for ids, _ in a[other]]
        for name in (one, other):
            for (ids, log_probs), (alone_ids, alone_log_probs) in zip(a[name], alone[name], strict=True):
                assert ids == alone_ids
                assert log_probs == pytest.approx(alone_log_probs, abs=1e-5)
