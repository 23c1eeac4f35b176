"""Whether a language model of transformers sees later tokens; found out by a small copy of it with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridflow.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_LENGTH, _TOKENS = 12, 7  # positions of the rows that it reads, and different tokens in them
_MOST = 2_000_000  # parameters of a copy, which is made in well under a second
_WIDTH, _HEADS, _EXPERTS, _INNER = 32, 4, 4, 16
_SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim_model", "word_embed_proj_dim", "embedding_size"), _WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_inner", "dim_ff", "n_inner", "decoder_ffn_dim"), _INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _INNER),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), _EXPERTS),
    **dict.fromkeys(("head_dim", "d_head", "dim_head", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}


def check_causal(model: PreTrainedModel, family: str) -> None:
    """Of a model that may be on the meta device.

    Where no copy of it with other sizes can be computed, its config is asked whether it is a decoder.

    Errors: ModelError for one that is not causal: what it says of a token would depend on later ones.
    """
    encoder = getattr(model.config, "is_decoder", None) is False
    seen = _sees_later(model)
    if seen or (seen is None and encoder):
        hint = ' Give it "is_decoder": true in its config.json if it was trained so, or use a causal model.'
        raise ModelError(
            f"this {family} model sees later tokens: log-probabilities of a token would know what follows it."
            f"{hint if encoder else ' Use a causal model.'}"
        )


def _sees_later(model: PreTrainedModel) -> bool | None:
    """Whether what a small copy says of all tokens but the last changes with the last; None without a copy."""
    import torch
    from huggingface_hub.errors import StrictDataclassError

    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        try:
            config = _small(model.config)
            with torch.device("meta"):
                if type(model)(config).num_parameters() > _MOST:
                    return None
            copy: Any = type(model)(config).eval().float()
            for parameter in copy.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.1))
            ids = torch.arange(1, _LENGTH + 1)[None] % _TOKENS
            first, second = _early(copy, ids), _early(copy, torch.cat([ids[:, :-1], ids[:, -1:] * 0], 1))
        except (ValueError, TypeError, AttributeError, LookupError, RuntimeError, AssertionError, ImportError):
            return None
        except StrictDataclassError:
            return None
    difference, size = (first - second).abs().max(), first.abs().max()
    return None if not bool(size.isfinite()) else bool(difference > 1e-5 * size)


def _early(copy: Any, ids_1S: torch.Tensor) -> torch.Tensor:
    """[S - 1, vocabulary]"""
    return copy(input_ids=ids_1S, use_cache=False).logits[0, :-1]


def _small(config: Any) -> Any:
    """A config of two layers and of few parameters; what says something of each layer does so of the two."""
    given = config.to_dict()
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in given.items():
        if isinstance(value, int) and not isinstance(value, bool) and name in _SMALL:
            given[name] = min(value, _SMALL[name])
        elif isinstance(value, list) and len(value) == layers:
            given[name] = [value[0], value[-1]]
    given.update(dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), None))
    return type(config).from_dict(given)
