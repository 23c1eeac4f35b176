"""Tokens/s, model FLOP/s utilisation and peak memory of one update on one rank, with random weights.

An update is `forward_backward` over all rows (a prompt and a response each, all of the same length) and an optimizer
step. Tokens are those of the rows. FLOP are those of the model: three times a forward pass, with half of the attention
matrix (causal) and the output layer at response tokens only. Recomputation of activations is not counted. Utilisation
is relative to the device's dense 16-bit peak, and null if the peak is unknown.

`--model` is Qwen2.5's 0.5B or 7B, or a tiny model for CPUs; `--backend` is the strategy. The program needs neither Ray
nor vLLM, and Megatron-core only for `megatron`. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import resource
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import hybridflow as hf
from benchmarks.packing import loss, make_batch, one_rank, synchronise
from hybridflow.engines.contract import UNINITIALIZED
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.train_backends import build_engine
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.describe.cluster_spec import peak_flops


def qwen(hidden: int, intermediate: int, layers: int, heads: tuple[int, int], vocab: int, tied: bool) -> ModelSpec:
    """Sizes of a Qwen2 model; `heads` are the numbers of query heads and of key heads."""
    config = {"model_type": "qwen2", "hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocab}
    config |= {"num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    return ModelSpec.from_hf_config({**config, "max_position_embeddings": 32768, "tie_word_embeddings": tied})


MODELS = {
    "tiny": qwen(128, 256, 4, (4, 2), 512, tied=False),
    "0.5b": qwen(896, 4864, 24, (14, 2), 151936, tied=True),
    "7b": qwen(3584, 18944, 28, (28, 4), 152064, tied=False),
}
# rows, tokens of prompt and response, tokens of a micro-batch, whether activations are recomputed
SIZES = {
    "tiny": (16, 32, 96, 1024, False),
    "0.5b": (64, 256, 768, 16384, False),
    "7b": (32, 256, 768, 4096, True),
}
BACKENDS = ("fsdp", "zero1", "zero2", "zero3", "megatron")
OPTIMIZERS = {"adam": hf.Adam(lr=1e-6), "sgd": hf.SGD(lr=1e-6)}


def update_flops(spec: ModelSpec, prompt: int, response: int, rows: int) -> float:
    """FLOP of the forward and backward passes over `rows` rows."""
    unread = 2.0 * spec.hidden * spec.vocab * prompt
    forward = float(spec.cost(torch.tensor(prompt + response))) - unread
    return 3.0 * rows * forward


def make_engine(backend: str, context: RankContext, spec: ModelSpec, optimizer: Any, **settings: Any) -> Any:
    """An engine with random weights, initialized on its device."""
    kinds = {"fsdp": hf.FSDP, "megatron": hf.Megatron}
    strategy: Any = kinds[backend](**settings) if backend in kinds else hf.ZeRO(stage=int(backend[-1]), **settings)
    engine = build_engine(context, strategy, spec, UNINITIALIZED, optimizer)
    with torch.no_grad():
        for tensor in engine.storage().values():
            tensor.fill_(1.0) if tensor.ndim == 1 else tensor.normal_(0.0, 0.02)
    engine.weights_loaded()
    return engine


def measure(engine: Any, batch: hf.Batch, repeats: int) -> list[float]:
    """Seconds of each update after two warm-up updates."""
    seconds = []
    for _ in range(repeats + 2):
        synchronise(engine.device)
        start = time.perf_counter()
        engine.forward_backward(batch, loss, ("log_probs",))
        engine.step()
        synchronise(engine.device)
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


def peak_memory(device: torch.device) -> dict[str, Any]:
    """Peak memory in GiB, and the kind of memory."""
    if device.type == "cuda":
        return {"peak_memory_gib": round(torch.cuda.max_memory_allocated(device) / (1 << 30), 2), "memory_of": "device"}
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    return {"peak_memory_gib": round(resident, 2), "memory_of": "process"}


def utilisation(achieved: float, device: str, dtype: str) -> dict[str, Any]:
    peak = peak_flops(device, dtype)
    if peak is not None:
        return {"utilisation": round(achieved / peak, 4), "peak_tflops": peak / 1e12}
    return {"utilisation": None, "reason": f"the peak of {device!r} in {dtype} is not known"}


def report(args: argparse.Namespace, context: RankContext, name: str) -> dict[str, Any]:
    """All measurements."""
    spec = MODELS[args.model]
    settings = {"micro_tokens": args.micro_tokens, "recompute": args.recompute, "dtype": args.dtype}
    if args.backend == "fsdp" and args.model == "7b":
        settings["reduce_often"] = True  # or there were gradients twice, those that wait for the last micro-batch too
    engine = make_engine(args.backend, context, spec, OPTIMIZERS[args.optimizer], **settings)
    batch = make_batch([args.prompt] * args.rows, [args.response] * args.rows, spec.vocab)
    seconds = statistics.median(measure(engine, batch, args.repeats))
    tokens, flops = args.rows * (args.prompt + args.response), update_flops(spec, args.prompt, args.response, args.rows)
    result = {
        "benchmark": "train_step",
        "device": name,
        "model": args.model,
        "parameters": spec.num_parameters,
        "backend": args.backend,
        **{key: getattr(args, key) for key in ("dtype", "optimizer", "recompute", "micro_tokens", "rows")},
        "tokens_per_row": args.prompt + args.response,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds),
        "model_tflops": round(flops / seconds / 1e12, 4),
        **utilisation(flops / seconds, name, args.dtype),
        **peak_memory(context.device),
    }
    engine.close()
    return result


def arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--model", choices=MODELS, help="default: tiny on a CPU, else 0.5b")
    parser.add_argument("--backend", choices=BACKENDS, default="fsdp")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    for name in ("rows", "prompt", "response", "micro-tokens"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction)
    args = parser.parse_args()
    if args.device == "cuda" and not cuda:
        parser.error("--device cuda: torch finds no CUDA device here.")
    args.model = args.model or ("0.5b" if args.device == "cuda" else "tiny")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    for name, size in zip(("rows", "prompt", "response", "micro_tokens", "recompute"), SIZES[args.model], strict=True):
        setattr(args, name, size if getattr(args, name) is None else getattr(args, name))
    return args


def main() -> None:
    args = arguments()
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if args.device == "cuda" else "cpu"
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world, timeout = dist.PrefixStore("world", store), datetime.timedelta(seconds=300)
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=world, rank=0, world_size=1, timeout=timeout)
    result = report(args, one_rank(args.backend, device, store), name)
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
