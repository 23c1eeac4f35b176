"""TokenModel: transformers' decoder with a head that is computed where it is read, never for all positions.

Shapes: b rows of a micro-batch, S positions, H hidden, N positions that are read, C columns of the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from hybridflow.config import LoRA
from hybridflow.engines.attention import register_packed_attention
from hybridflow.engines.lora.injection import inject
from hybridflow.engines.micro_batches import Sequences
from hybridflow.models.spec import ModelSpec


class TokenModel(nn.Module):
    """The decoder as `model` and its head as `lm_head` (the embedding itself where it is tied) or `score`.

    Parameters have their canonical (Hugging Face) names. Made on the meta device: nothing is allocated before
    the model is cut. It is `packable`: takes packed rows. With `recompute` activations of a decoder layer are computed
    again in the backward pass. With `lora` the decoder has adapters, float32 whatever `dtype` is.
    """

    packable = True

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, *, recompute: bool = False, lora: LoRA | None = None
    ) -> None:
        super().__init__()
        self.config, attention = hf_config(spec), register_packed_attention()
        with torch.device("meta"):
            self.model: Any = AutoModel.from_config(self.config, dtype=dtype, attn_implementation=attention)
            columns = 1 if spec.head == "value" else spec.vocab
            head = nn.Linear(spec.hidden, columns, bias=False, dtype=dtype)
        if lora is not None:
            inject(self.model, spec, lora)
            head = head.float() if spec.head == "value" else head  # it is trained, as the adapters are
        if recompute:
            random = lora is not None and lora.dropout > 0
            for i, layer in enumerate(self.layers):
                self.layers[i] = checkpoint_wrapper(layer, preserve_rng_state=random)
        self._head = "score" if spec.head == "value" else "lm_head"
        self._tied = spec.tied and spec.head == "lm"
        setattr(self, self._head, head)
        self.tie()

    @property
    def decoder(self) -> nn.Module:
        return self.model

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def head(self) -> nn.Linear:
        return getattr(self, self._head)

    def tie(self) -> None:
        """Make tied embeddings one parameter, also after something replaced one of them."""
        if self._tied:
            self.head.weight = self.model.embed_tokens.weight

    def make_buffers(self, device: torch.device) -> None:
        """Make what is no parameter, rotary frequencies, where the model computes; once parameters have memory."""
        with torch.device("cpu"):
            rotary = type(self.model.rotary_emb)(self.config)
        self.model.rotary_emb = rotary.to(device)

    def forward(self, ids_bS: Tensor, index_N: Tensor, positions_bS: Tensor, sequences: Sequences | None) -> Tensor:
        """[N, C]: the head at `index_N`, positions in the flattened [b * S].

        `ids_bS` and `positions_bS`, each token's place in its row, int64. With `sequences` ids are one packed row;
        else rows are padded on the right, where a causal mask needs no other.
        """
        out = self.model(input_ids=ids_bS, position_ids=positions_bS, use_cache=False, sequences=sequences)
        return self.head(out.last_hidden_state.flatten(0, 1)[index_N])


def hf_config(spec: ModelSpec) -> PreTrainedConfig:
    """The transformers configuration of the model that `spec` describes."""
    scaling = {name: int(value) if name.startswith("original") else value for name, value in spec.rope_scaling}
    rope = {"rope_type": "llama3" if scaling else "default", "rope_theta": spec.rope_theta, **scaling}
    window: dict[str, Any] = {"sliding_window": spec.sliding_window}
    if spec.family.startswith("qwen"):
        window |= {"use_sliding_window": spec.sliding_window is not None, "max_window_layers": 0}
    return AutoConfig.for_model(
        spec.family,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab,
        max_position_embeddings=spec.context,
        rms_norm_eps=spec.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=spec.tied,
        pad_token_id=None,  # its embedding would not be trained
        **window,
    )
