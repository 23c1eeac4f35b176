"""What the processes of test_vllm_engine.py do: every scenario once, answered in plain values."""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.config import VLLM, Sampling, Until
from hybridflow.engines.process_groups import ProcessGroups, RankContext
from hybridflow.engines.vllm.engine import VLLMEngine
from hybridflow.errors import HybridFlowError
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests.integration import schedulers, session_scenarios, turn_scenarios

VOCAB, CONTEXT, EOS = 70, 64, 1  # 70 rows of vocabulary: vLLM pads them to 128
FAMILIES = ("llama", "qwen2", "qwen3")
PROMPTS = [[5, 9, 33, 69], [12, 7], [3, 3, 40, 41, 42, 8], [60]]
SEEDS = [11, 12, 13, 14]
GREEDY = Sampling(max_tokens=6, greedy=True, ignore_eos=True)
RANDOM = Sampling(max_tokens=8, temperature=0.7, n=2)

# name: (world ranks, training grid (p, t, d), p_g, t_g, family)
SCENARIOS: dict[str, tuple[list[int], tuple[int, int, int], int, int, str]] = {
    "llama": ([2], (1, 1, 1), 1, 1, "llama"),  # first: others continue its rows
    "p1t4-p1t2": ([0, 1, 2, 3], (1, 4, 1), 1, 2, "llama"),
    "p2t2-p2t1": ([0, 1, 2, 3], (2, 2, 1), 2, 1, "llama"),
    "p2t2-p1t2": ([0, 1, 2, 3], (2, 2, 1), 1, 2, "qwen3"),
    "d4-p1t2": ([0, 1, 2, 3], (1, 1, 4), 1, 2, "llama"),  # generation groups over several training replicas
    "d4-p1t4": ([0, 1, 2, 3], (1, 1, 4), 1, 4, "llama"),  # two ranks per kv-head; the last has no vocabulary
    "p1t2d2-p2t2": ([0, 1, 2, 3], (1, 2, 2), 2, 2, "qwen3"),
    "slice-p1t2-p1t2": ([2, 3], (1, 2, 1), 1, 2, "qwen2"),
    "slice-p2t1-p2t1": ([2, 3], (2, 1, 1), 2, 1, "qwen3"),
    "p1t2-p1t1": ([0, 1], (1, 2, 1), 1, 1, "llama"),
    "qwen2": ([0], (1, 1, 1), 1, 1, "qwen2"),
    "qwen3": ([1], (1, 1, 1), 1, 1, "qwen3"),
}
LACKING = ("p2t2-p2t1", "d4-p1t2")  # whose last rank of a replica lacks memory


def save_model(family: str, directory: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    extra = {"head_dim": 32} if family != "qwen2" else {}
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=3,  # an uneven pipeline: 2 + 1
        num_attention_heads=4,
        num_key_value_heads=1 if family == "qwen2" else 2,  # one kv-head is replicated over two ranks
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=family == "qwen3",
        initializer_range=0.15,
        eos_token_id=EOS,
        **extra,
    )
    torch.manual_seed(len(family) + ord(family[-1]))
    model = AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(directory)


def _weights(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def _write(engine: VLLMEngine, rank: int, weights: dict[str, Tensor], scale: float = 1.0) -> None:
    """Write canonical tensors through the layout; vocabulary padding is poisoned to show that nobody reads it."""
    storage = engine.storage()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in storage:
            storage[name].fill_(1e4)
    for region in engine.layout().regions(rank):
        box = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
        region.view(storage[region.storage]).copy_(weights[region.box.tensor][box] * scale)
    engine.weights_changed()


def _cycle(engine: VLLMEngine, rank: int, weights: dict[str, Tensor]) -> None:
    """What a transition does: nothing has memory in between, and weights come back tensor by tensor."""
    memory, regions = engine.memory(), engine.layout().regions(rank)
    views = [region.view(engine.storage()[region.storage]) for region in regions]
    engine.sleep()
    memory.release()
    for name, tensor in engine.storage().items():
        assert tensor.untyped_storage().nbytes() == 0
        memory.acquire([name])
        tensor.fill_(torch.nan)
        for region, view in zip(regions, views, strict=True):
            if region.storage == name:
                box = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
                view.copy_(weights[region.box.tensor][box])
    engine.wake()
    engine.weights_changed()


def _released(engine: VLLMEngine, rank: int, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Weights without memory, and what is drawn when they have been written anew."""
    memory = engine.memory()
    stored = sum(tensor.nbytes for tensor in engine.storage().values())
    sizes = [memory.total_bytes == stored, memory.resident_bytes == stored]
    memory.release(list(engine.storage())[:2])
    some = _error(lambda: engine.generate(PROMPTS, GREEDY))
    memory.release()
    out = {
        "sizes": [*sizes, memory.resident_bytes == 0],
        "errors": (some, _error(lambda: engine.generate([[5]], GREEDY))),
    }
    memory.acquire()
    _cycle(engine, rank, weights)
    return out | {"greedy": _plain(engine.generate(PROMPTS, GREEDY)), "kept": memory is engine.memory()}


def _shared(engine: VLLMEngine, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Weights in the memory of somebody else, who changes them and keeps them when vLLM releases its own."""
    storage, name = engine.storage(), "model.layers.1.mlp.down_proj.weight"
    ours = {key: tensor.clone() for key, tensor in storage.items()}
    wrong = [ours[name][1:], ours[name].bfloat16(), ours[name].T.contiguous().T]
    out: dict[str, Any] = {
        "refused": [engine.share(name, tensor) for tensor in wrong],
        "unknown": _error(lambda: engine.share("lm_head", ours[name])),
        "one": engine.share(name, ours[name]),
        "same": _plain(engine.generate(PROMPTS, GREEDY)),
    }
    ours[name].mul_(0.5)
    engine.weights_changed()
    out["changed"] = _plain(engine.generate(PROMPTS, GREEDY))
    engine.memory().release()
    out["left"] = (engine.memory().resident_bytes, float(ours[name].abs().sum()) > 0)
    out["early"] = _error(lambda: engine.share("model.norm.weight", ours["model.norm.weight"]))
    engine.memory().acquire()
    ours[name].div_(0.5)
    _write(engine, 0, weights)
    out["back"] = _plain(engine.generate(PROMPTS, GREEDY))
    out["all"] = all(engine.share(key, tensor) for key, tensor in ours.items())
    _write(engine, 0, weights)
    out["rest"] = engine.memory().total_bytes
    out["again"] = _plain(engine.generate(PROMPTS, GREEDY))
    return out


def _growth(engine: VLLMEngine, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Memory of the process over 20 cycles of release and acquire, after 3."""
    drawn = []
    for cycle in range(23):
        if cycle == 3:
            before = _rss()
        _cycle(engine, 0, weights)
        drawn.append(_plain(engine.generate(PROMPTS, GREEDY)))
    return {"bytes": (before, _rss()), "equal": drawn.count(drawn[0]) == len(drawn), "greedy": drawn[0]}


def _rss() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _plain(rows: list[list[Any]]) -> list[list[tuple[list[int], list[float], bool]]]:
    return [[(c.token_ids, c.log_probs, c.finished) for c in row] for row in rows]


def _error(call) -> str:
    try:
        call()
    except HybridFlowError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _context(world_rank: int, store: dist.Store, name: str, ranks: list[int], grid: RankGrid) -> RankContext:
    groups = ProcessGroups(store, name, ranks, ranks.index(world_rank), torch.device("cpu"), 60.0)
    return RankContext("actor", ranks.index(world_rank), grid, torch.device("cpu"), groups)


def _scenario(world_rank: int, store: dist.Store, name: str, root: Path) -> dict[str, Any] | None:
    ranks, sizes, p_g, t_g, family = SCENARIOS[name]
    if world_rank not in ranks:
        return None
    os.environ["HYBRIDFLOW_SESSION"] = "5e5510"
    context = _context(world_rank, store, name, ranks, RankGrid(*sizes))
    grid = context.grid.generation(p_g, t_g)
    strategy = VLLM(tp=t_g, pp=p_g, kv_cache_gb=0.02, max_sequences=16)
    spec, weights = ModelSpec.from_checkpoint(root / family), _weights(root / family)
    generator_state = torch.get_rng_state()
    engine = VLLMEngine(context, strategy, grid, spec, root / family)
    out: dict[str, Any] = {
        "replica": grid.replica(context.rank),
        "rng": torch.equal(generator_state, torch.get_rng_state()),
    }
    out["covered"] = sum(region.box.numel for region in engine.layout().regions(context.rank))
    out["stored"] = sum(tensor.numel() for tensor in engine.storage().values())
    out["token bytes"] = engine._image._block_bytes // engine._alive().vllm_config.cache_config.block_size
    dist.barrier(context.groups.everyone())
    out["ident"] = engine._groups.ident
    out["segments"] = [str(p) for p in Path("/dev/shm").glob(f"*{engine._groups.ident}*")]
    _write(engine, context.rank, weights)
    out["greedy"] = _plain(engine.generate(PROMPTS, GREEDY))
    out["random"] = _plain(engine.generate(PROMPTS, RANDOM, SEEDS))
    out["released"] = _released(engine, context.rank, weights)
    rows = slice(grid.replica(context.rank) % 2 * 2, grid.replica(context.rank) % 2 * 2 + 2)
    out["split"] = (rows.start, _plain(engine.generate(PROMPTS[rows], RANDOM, SEEDS[rows])))
    out["unseeded"] = [_plain(engine.generate(PROMPTS, RANDOM)) for _ in range(2)]
    out["empty"] = engine.generate([], GREEDY)
    out["waiting"] = session_scenarios.asleep(engine)
    if name in LACKING:
        out["lacking"] = session_scenarios.lacking(engine)
    _write(engine, context.rank, weights, scale=0.8)
    out["scaled"] = _plain(engine.generate(PROMPTS, GREEDY))
    if family == "llama" and name != "llama":
        _write(engine, context.rank, weights)
        out["session"] = session_scenarios.several_ranks(engine, root / "rows.json")
        out["turns"] = turn_scenarios.both(engine)
    if name == "llama":
        _write(engine, 0, weights)
        out["session"] = session_scenarios.single(
            engine, root / "rows.json", lambda scale: _write(engine, 0, weights, scale)
        )
        out["turns"] = turn_scenarios.both(engine)
        out["crowded"] = turn_scenarios.crowded(engine)
        out["kept"] = _kept(engine, weights)
        out |= _single(engine, context, strategy, spec, weights, root / family)
    engine.close()
    engine.close()
    out["world"] = dist.is_initialized() and dist.get_world_size()
    context.groups.close()
    return out


def _single(
    engine: VLLMEngine, context: RankContext, strategy: VLLM, spec: ModelSpec, weights: dict[str, Tensor], path: Path
) -> dict[str, Any]:
    """What one rank is enough for."""
    _write(engine, 0, weights)
    out: dict[str, Any] = {}
    for name, sampling in {
        "top_k": Sampling(max_tokens=12, top_k=3, temperature=1.3),
        "top_p": Sampling(max_tokens=12, top_p=0.5, temperature=1.3),
        "eos": Sampling(max_tokens=40, temperature=3.0, n=4),
        "no_eos": Sampling(max_tokens=40, temperature=3.0, n=4, ignore_eos=True),
    }.items():
        out[name] = _plain(engine.generate(PROMPTS, sampling, SEEDS))
    long = [[t % 60 + 2 for t in range(40)]]
    out["cached"] = [_plain(engine.generate(long, GREEDY)) for _ in range(2)]
    engine.sleep()
    out["asleep"] = (engine.cache_bytes, _error(lambda: engine.generate(long, GREEDY)))
    engine.wake()
    out["woken"] = _plain(engine.generate(long, GREEDY))

    def another() -> VLLMEngine:
        return VLLMEngine(context, strategy, engine.grid, spec, path)

    out["errors"] = {
        "long": _error(lambda: engine.generate([[1, 2], list(range(CONTEXT))], GREEDY)),
        "room": _error(lambda: engine.generate([[1] * (CONTEXT - 5)], GREEDY)),
        "empty": _error(lambda: engine.generate([[4], []], GREEDY)),
        "vocabulary": _error(lambda: engine.generate([[4], [VOCAB]], GREEDY)),
        "stop": _error(lambda: engine.generate(PROMPTS, Sampling(stop=("x",)))),
        "seeds": _error(lambda: engine.generate(PROMPTS, GREEDY, [1])),
        "partition": _error(lambda: _with_variable("VLLM_PP_LAYER_PARTITION", "3", another)),
        "invariant": _error(lambda: _with_variable("VLLM_BATCH_INVARIANT", "1", another)),
        "second": _error(another),
    }
    out["stages"] = _stages_of_vllm()
    out["schedulers"] = schedulers.compared(engine._alive())
    out["growth"] = _growth(engine, weights)
    out["shared"] = _shared(engine, weights)
    _save_tokenizer(path)
    text = Sampling(max_tokens=30, temperature=3.0, stop=("w7", "w8 w"), ignore_eos=True)
    out["stop"] = _plain(engine.generate(PROMPTS, text, SEEDS))
    out["stop session"] = session_scenarios.with_stop_strings(engine)
    out["stop turns"] = turn_scenarios.with_stop_strings(engine)
    return out


def _kept(engine: VLLMEngine, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Rows that keep their KV cache, of prompts that fill blocks of it, when weights change; and new ones beside."""
    long = [[t % 60 + 2 for t in range(40)]]
    sampling = Sampling(max_tokens=10, greedy=True, ignore_eos=True)
    loop, out = engine._loop, dict[str, Any]()
    scheduler: Any = engine._alive().scheduler
    loop._keeps = True
    for name, scale in (("equal", 1.0), ("other", 0.8)):
        _write(engine, 0, weights)
        engine.submit(engine.new_rows(long, sampling))
        engine.advance(Until(steps=4))
        _write(engine, 0, weights, scale)
        computed = [request.num_computed_tokens for request in scheduler.requests.values()]
        fresh = engine.generate(long, sampling)[0][0]
        out[name] = (computed, fresh.token_ids, session_scenarios.plain(engine.take()))
    loop._keeps = False
    _write(engine, 0, weights, 0.8)
    out["fresh"] = engine.generate(long, sampling)[0][0].token_ids
    _write(engine, 0, weights)
    out["whole"] = engine.generate(long, sampling)[0][0].token_ids
    return out


def _with_variable(name: str, value: str, build: Callable[[], VLLMEngine]) -> None:
    os.environ[name] = value
    try:
        build()
    finally:
        del os.environ[name]


def _stages_of_vllm() -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(layers, stages) -> first and last layer of each stage, as vLLM divides them."""
    from vllm.distributed.utils import get_pp_indices

    sizes = [(layers, stages) for layers in range(1, 30) for stages in range(1, layers + 1)]
    return {(n, stages): [get_pp_indices(n, i, stages) for i in range(stages)] for n, stages in sizes}


def _save_tokenizer(directory: Path) -> None:
    """Words w0..w69, one per token id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def process(world_rank: int, port: int, root: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 4, world_rank == 0, datetime.timedelta(seconds=100))
    world = dist.PrefixStore("world", store)
    dist.init_process_group("gloo", store=world, rank=world_rank, world_size=4, timeout=datetime.timedelta(seconds=100))
    torch.save({name: _scenario(world_rank, store, name, root) for name in names}, root / f"rank{world_rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
