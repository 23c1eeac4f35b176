"""Megatron's GPTModel of an Architecture: one pipeline stage of one tensor parallel rank."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridflow.config import Megatron
from hybridflow.engines.megatron.experts import MixtureOfExperts
from hybridflow.engines.megatron.layers import (
    CoreAttention,
    Gated,
    HeadsNorm,
    LatentAttention,
    LayerOutput,
    RMSNorm,
    Rotary,
    SelectedPositions,
    SharedHeadAttention,
    ValueHead,
    use_onednn,
)
from hybridflow.engines.megatron.layout import padded_vocab
from hybridflow.models.architecture import Architecture, Attention, Rotation
from hybridflow.topology import Coords, RankGrid

RNG_NAME = "model-parallel-rng"


def transformer_config(
    arch: Architecture, strategy: Megatron, grid: RankGrid, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    """No fusion needs an extension; losses are shares of a global sum, so nothing is averaged."""
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        ffn_hidden_size=arch.intermediate,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        layernorm_zero_centered_gamma=arch.norm_shift == 1.0,
        qk_layernorm=arch.qk_norm == "head",  # Megatron then adds up the gradients of copies, which others are not
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,  # the layer spec's activation (Gated) takes the fused gate and up
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=grid.t,
        pipeline_model_parallel_size=grid.p,
        sequence_parallel=sequence_parallel(strategy, grid, arch),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        **(recompute if strategy.recompute else {}),  # type: ignore[arg-type]
    )


def sequence_parallel(strategy: Megatron, grid: RankGrid, arch: Architecture) -> bool:
    """Tensor parallel ranks with experts share the tokens: each sends its own to them."""
    return grid.t > 1 and (strategy.sequence_parallel or arch.experts is not None)


def build_gpt(
    arch: Architecture,
    config: TransformerConfig,
    at: Coords,
    layers: range,
    groups: ProcessGroupCollection,
    device: torch.device,
) -> tuple[GPTModel, SelectedPositions]:
    """This rank's stage of decoder `layers`, its weights not yet set, and the selection of positions before its output
    layer."""
    first, last = at.p == 0, at.p == config.pipeline_model_parallel_size - 1
    if config.sequence_parallel:
        _prepare_sequence_parallel()
    rotary = {each.rotation: Rotary(each.rotation) for each in arch.attention if each.rotation is not None}
    specs = [_layer(arch, config, layer, rotary, groups) for layer in layers]
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(specs, RMSNorm),  # type: ignore[arg-type]
        vocab_size=padded_vocab(arch.vocab, config.tensor_model_parallel_size),
        max_sequence_length=arch.context,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=arch.tied and arch.head == "lm",
        position_embedding_type="none",  # our core attention rotates
        pg_collection=groups,
    )
    selection = SelectedPositions(groups.tp, config.sequence_parallel)
    if first and arch.embedding_scale != 1.0:
        model.embedding.register_forward_hook(partial(_scaled, arch.embedding_scale))
    if last:
        if arch.head == "value":
            model.output_layer = ValueHead(arch.hidden, config.params_dtype, device)  # type: ignore[assignment]
        else:
            model.output_layer.sequence_parallel = False  # see SelectedPositions
            model.output_layer.allreduce_dgrad = config.tensor_model_parallel_size > 1
        model.output_layer.register_forward_pre_hook(selection)
        if arch.head == "lm" and (arch.logit_scale, arch.logit_softcap) != (1.0, None):
            model.output_layer.register_forward_hook(partial(_logits, arch))
    _mark_tensor_parallel(model)
    if device.type == "cpu" and config.params_dtype == torch.float32:
        use_onednn(model)
    return model, selection


@contextmanager
def without_output_layer(model: GPTModel) -> Iterator[None]:
    """Inside, the model returns the selected hidden states, [1, N, H], which its output layer would take."""
    model.output_layer.forward = lambda rows, *args, **kwargs: (rows, None)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.output_layer.forward


def _scaled(scale: float, module: nn.Module, args: tuple, out: Tensor) -> Tensor:
    """Hook: the output times `scale`, rounded as transformers rounds it."""
    return out * float(torch.tensor(scale, dtype=out.dtype))


def _logits(arch: Architecture, module: nn.Module, args: tuple, out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Hook of the output layer: scaled and capped, unless it is left out (`without_output_layer`)."""
    rows, bias = out
    if rows is args[0]:
        return out
    rows = rows * arch.logit_scale if arch.logit_scale != 1.0 else rows
    return (rows if arch.logit_softcap is None else (rows / arch.logit_softcap).tanh() * arch.logit_softcap), bias


def _layer(
    arch: Architecture,
    config: TransformerConfig,
    layer: int,
    rotary: Mapping[Rotation, Rotary],
    groups: ProcessGroupCollection,
) -> ModuleSpec:
    norms = arch.norms
    mlp = MLPSubmodules(
        linear_fc1=ColumnParallelLinear,
        activation_func=ModuleSpec(Gated, {"activation": arch.activation}),  # type: ignore[arg-type]
        linear_fc2=_output(arch, norms.after_mlp),  # type: ignore[arg-type]
    )
    if arch.sparse[layer]:
        ends = ModuleSpec(MixtureOfExperts, {"experts": arch.experts, "groups": groups, "shared": mlp})
    else:
        ends = ModuleSpec(MLP, submodules=mlp)
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm if norms.before_attention else IdentityOp,
            self_attention=_self_attention(arch, config, arch.attention[layer], rotary, groups),
            self_attn_bda=get_bias_dropout_add,  # type: ignore[arg-type]
            pre_mlp_layernorm=RMSNorm if norms.before_mlp else IdentityOp,
            mlp=ends,
            mlp_bda=get_bias_dropout_add,  # type: ignore[arg-type]
        ),
    )


def _self_attention(
    arch: Architecture,
    config: TransformerConfig,
    each: Attention,
    rotary: Mapping[Rotation, Rotary],
    groups: ProcessGroupCollection,
) -> ModuleSpec:
    turns = None if each.rotation is None else rotary[each.rotation]
    output = _output(arch, arch.norms.after_attention)
    if arch.latent is not None:  # which rotates a part of a head
        core = partial(CoreAttention, arch, each, None)
        return ModuleSpec(LatentAttention, {"arch": arch, "rotary": turns, "core": core, "output": output})
    parts = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,  # type: ignore[arg-type]
        core_attention=partial(CoreAttention, arch, each, turns),  # type: ignore[arg-type]
        linear_proj=output,
        q_layernorm=_heads_norm(arch, arch.heads, groups),
        k_layernorm=_heads_norm(arch, arch.kv_heads, groups),
    )
    own_heads = arch.kv_heads >= config.tensor_model_parallel_size
    kind = SelfAttention if own_heads else SharedHeadAttention
    return ModuleSpec(kind, {"attn_mask_type": AttnMaskType.causal}, parts)


def _output(arch: Architecture, norm: str) -> Any:
    if not norm and arch.residual_scale == 1.0:
        return RowParallelLinear
    return ModuleSpec(LayerOutput, {"normed": bool(norm), "scale": arch.residual_scale})


def _heads_norm(arch: Architecture, heads: int, groups: ProcessGroupCollection) -> Any:
    if arch.qk_norm == "all":
        return ModuleSpec(HeadsNorm, {"heads": heads, "group": groups.tp})
    return RMSNorm if arch.qk_norm else IdentityOp


def _prepare_sequence_parallel() -> None:
    """Megatron keeps two things per process, not per model, for this mode: a scratch buffer and a generator state
    (for dropout, which is off)."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    tracker: Any = get_cuda_rng_tracker()
    if RNG_NAME not in tracker.get_states():
        tracker.add(RNG_NAME, 1234)


def _mark_tensor_parallel(model: nn.Module) -> None:
    """Megatron marks split weights while it initialises them, which we do not let it; unmarked weights would count
    as copies and miss in the gradient norm of tensor parallel ranks other than the first."""
    for module in model.modules():
        split = isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding)
        if split and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, int(isinstance(module, RowParallelLinear)), 1)


# Running Megatron-core where there is no CUDA: inert when the device is a CUDA one. Megatron writes `device="cuda"` and
# `torch.cuda.current_device()` into its code. On a CPU its modules are given a namespace of their own in the place of
# `torch`, so nothing that other libraries see is patched.

_MODULES = (
    "models.gpt.gpt_model",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.random",
    "transformer.transformer_layer",
    "utils",
)


def prepare(device: torch.device) -> None:
    """Make Megatron use `device` in this process; may be called any number of times."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return
    for name in _MODULES:
        module: Any = importlib.import_module(f"megatron.core.{name}")
        if not isinstance(module.torch, _CpuTorch):
            module.torch = _CpuTorch()
    rng: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def building(device: torch.device) -> AbstractContextManager:
    """For the construction of models, which call `Tensor.cuda()`."""
    return nullcontext() if device.type == "cuda" else _StayOnCpu()


class _CpuCuda(types.ModuleType):
    """Megatron's part of `torch.cuda`, for the CPU."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.__dict__.update(vars(torch.cuda))
        self.current_device = lambda: torch.device("cpu")
        self.get_rng_state, self.set_rng_state = torch.get_rng_state, torch.set_rng_state
        self.manual_seed = torch.manual_seed
        self.synchronize = self.empty_cache = lambda *args: None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _CpuTorch(types.ModuleType):
    """`torch`, but tensors asked for on "cuda" are made on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.__dict__.update(vars(torch))  # each of Megatron's operations looks one up
        self.cuda = _CpuCuda()
        for name in ("empty", "zeros", "ones", "full", "tensor"):
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable) -> Callable:
    def make(*args, device: Any = None, **kwargs):
        return factory(*args, device="cpu" if device in ("cuda", 0) else device, **kwargs)

    return make


class _StayOnCpu(TorchFunctionMode):
    """Tensors that are sent to CUDA stay where they are."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func is torch.Tensor.cuda else func(*args, **(kwargs or {}))
