"""Megatron's GPTModel from a ModelSpec: one pipeline stage of one tensor parallel rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from torch import nn

from hybridflow.config import Megatron
from hybridflow.engines.megatron.layers import (
    CoreAttention,
    RMSNorm,
    Rotary,
    SelectedPositions,
    SharedHeadAttention,
    SwiGLU,
    ValueHead,
    use_onednn,
)
from hybridflow.engines.megatron.layout import padded_vocab
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import Coords, RankGrid

RNG_NAME = "model-parallel-rng"


def transformer_config(
    spec: ModelSpec, strategy: Megatron, grid: RankGrid, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    """No fusion needs an extension; losses are shares of a global sum, so nothing is averaged."""
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        ffn_hidden_size=spec.intermediate,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        qk_layernorm=spec.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,  # the layer spec's activation (SwiGLU) takes the fused gate and up
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=grid.t,
        pipeline_model_parallel_size=grid.p,
        sequence_parallel=sequence_parallel(strategy, grid),
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


def sequence_parallel(strategy: Megatron, grid: RankGrid) -> bool:
    return strategy.sequence_parallel and grid.t > 1


def build_gpt(
    spec: ModelSpec,
    config: TransformerConfig,
    at: Coords,
    layers: int,
    groups: ProcessGroupCollection,
    device: torch.device,
) -> tuple[GPTModel, SelectedPositions]:
    """This rank's stage of `layers` decoder layers, its weights not yet set, and the selection of positions before its
    output layer."""
    first, last = at.p == 0, at.p == config.pipeline_model_parallel_size - 1
    if config.sequence_parallel:
        _prepare_sequence_parallel()
    model = GPTModel(
        config=config,
        transformer_layer_spec=_block(spec, config, layers),  # type: ignore[arg-type]
        vocab_size=padded_vocab(spec.vocab, config.tensor_model_parallel_size),
        max_sequence_length=spec.context,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=spec.tied and spec.head == "lm",
        position_embedding_type="none",  # our core attention rotates
        pg_collection=groups,
    )
    selection = SelectedPositions(groups.tp, config.sequence_parallel)
    if last:
        if spec.head == "value":
            model.output_layer = ValueHead(spec.hidden, config.params_dtype, device)  # type: ignore[assignment]
        else:
            model.output_layer.sequence_parallel = False  # see SelectedPositions
            model.output_layer.allreduce_dgrad = config.tensor_model_parallel_size > 1
        model.output_layer.register_forward_pre_hook(selection)
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


def _block(spec: ModelSpec, config: TransformerConfig, layers: int) -> TransformerBlockSubmodules:
    own_heads = spec.kv_heads >= config.tensor_model_parallel_size
    qk_norm = RMSNorm if spec.qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,  # type: ignore[arg-type]
        core_attention=partial(CoreAttention, Rotary(spec), spec.sliding_window),  # type: ignore[arg-type]
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, activation_func=SwiGLU, linear_fc2=RowParallelLinear)
    layer = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=ModuleSpec(
            SelfAttention if own_heads else SharedHeadAttention, {"attn_mask_type": AttnMaskType.causal}, attention
        ),
        self_attn_bda=get_bias_dropout_add,  # type: ignore[arg-type]
        pre_mlp_layernorm=RMSNorm,
        mlp=ModuleSpec(MLP, submodules=mlp),
        mlp_bda=get_bias_dropout_add,  # type: ignore[arg-type]
    )
    return TransformerBlockSubmodules([ModuleSpec(TransformerLayer, submodules=layer)] * layers, RMSNorm)  # type: ignore[arg-type]


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
