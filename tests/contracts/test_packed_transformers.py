"""Any transformers decoder computes a packed row like its rows one by one, with gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.batch.ragged import Ragged
from hybridflow.engines.attention import register_packed_attention
from hybridflow.engines.micro_batches import Split, in_order
from hybridflow.errors import ModelError
from tests.contracts.example_models import FAMILIES, load_model, make_batch, make_model

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
OTHERS = {  # what ModelSpec does not describe: no mask between layers of different windows, biases, other norms
    "qwen3-two-windows": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "olmo2": {"model_type": "olmo2"},
    "granite": {"model_type": "granite", "attention_multiplier": 0.2},
    "cohere": {"model_type": "cohere"},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


def make_other(name: str, attention: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**(SIZES | OTHERS[name]))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)


def row_by_row(model, rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([model(row[None], use_cache=False).logits[0] for row in rows])


def assert_packed(expected, model, recompute: bool = False) -> None:
    """Log-probs of packed micro-batches and the gradients of their sum are those of the rows, one by one."""
    batch = make_batch()
    prompts, responses = batch.peek("prompt_ids"), batch.peek("response_ids")
    rows = [torch.cat(pair) for pair in zip(prompts.rows(), responses.rows(), strict=True)]
    want = []
    for prompt, row in zip(prompts.rows(), rows, strict=True):
        logits = expected(row[None], use_cache=False).logits[0]
        want.append(logits[:-1].log_softmax(-1).gather(-1, row[1:, None])[len(prompt) - 1 :, 0])
    found, micro_batches = [], Split(48, multiple=4).micro_batches(prompts, responses)
    assert 1 < len(micro_batches) < len(rows)
    for micro in micro_batches:
        given = {"input_ids": micro.ids, "position_ids": micro.positions, "sequences": micro.sequences}
        forward = lambda given=given: model(**given, use_cache=False).logits  # noqa: E731
        logits = checkpoint(forward, use_reentrant=False) if recompute else forward()
        at = logits[0, micro.index[: micro.selected]]
        found.append(at.log_softmax(-1).gather(-1, micro.targets[:, None])[:, 0])
    packed, single = in_order(micro_batches, found), Ragged.from_rows(want)
    assert packed.offsets.equal(single.offsets)
    assert float((packed.values - single.values).detach().abs().max()) < 1e-5
    for output in (packed, single):
        (output.values * torch.linspace(-1, 1, len(output.values))).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in expected.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-4, rtol=1e-4), name


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_of_every_family(tmp_path: Path, name):
    path = make_model(name, tmp_path)
    model = load_model(path)
    model.set_attn_implementation(register_packed_attention())
    assert_packed(load_model(path), model)


@pytest.mark.parametrize("name", OTHERS)
def test_packed_rows_of_other_decoders(name):
    packed = make_other(name, register_packed_attention())
    eager = make_other(name, "eager")
    packed.load_state_dict(eager.state_dict())
    assert_packed(eager, packed)


def test_layers_that_are_recomputed_know_their_own_sequences():
    packed, eager = make_other("olmo2", register_packed_attention()), make_other("olmo2", "eager")
    packed.load_state_dict(eager.state_dict())
    assert_packed(eager, packed, recompute=True)


def test_padded_rows_need_no_mask():
    packed, eager = (
        make_other("qwen3-two-windows", register_packed_attention()),
        make_other("qwen3-two-windows", "eager"),
    )
    packed.load_state_dict(eager.state_dict())
    rows = [torch.arange(3, 3 + n) for n in (12, 5)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.no_grad():
        logits = packed(padded, use_cache=False).logits
        found = torch.cat([logits[i, : len(row)] for i, row in enumerate(rows)])
        assert torch.allclose(found, row_by_row(eager, rows), atol=1e-5)


def test_attention_that_is_not_ours_is_refused():
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt_oss", **SIZES, num_local_experts=2, num_experts_per_tok=1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=register_packed_attention())
    with pytest.raises(ModelError, match="GptOssAttention attends with s_aux, which packed attention"):
        model(torch.tensor([[3, 4, 5]]), use_cache=False)
