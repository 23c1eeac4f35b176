"""vLLM's CUDA operators of mixtures of experts, in plain torch on CPU tensors.

Shape letters: T tokens, K experts of a token, E experts, H width in, N width out. A choice is a token with one of its
experts, number token * K + k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def choose(scores: Tensor, weights: Tensor, experts: Tensor, source: Tensor, renormalize: bool, bias: Tensor | None):
    """`weights`, `experts`, `source` [T, K] := of the best `scores` [T, E]; a bias counts for the choice only."""
    best = (scores if bias is None else scores + bias.float()).topk(experts.shape[1], -1).indices
    chosen = scores.gather(1, best)
    weights.copy_(chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen)
    experts.copy_(best)
    source.copy_(torch.arange(source.numel()).view(source.shape[1], -1).t())


def topk_softmax(weights, experts, source, logits, renormalize, bias, is_padding=None):
    choose(logits.float().softmax(-1), weights, experts, source, renormalize, bias)


def topk_sigmoid(weights, experts, source, logits, renormalize, bias, scale, is_padding=None):
    choose(logits.float().sigmoid(), weights, experts, source, renormalize, bias)
    weights.mul_(scale)


def moe_align_block_size(topk_ids, num_experts, block_size, sorted_ids, experts, total, expert_map=None, scatter=None):
    """Choices by expert, each expert's padded to whole blocks with a number that is no choice."""
    if scatter is not None:
        raise NotImplementedError("emulated CUDA: moe_align_block_size with scatter_idx")
    flat, rows, blocks = topk_ids.flatten(), [], []
    for expert in range(num_experts):
        own = (flat == expert).nonzero().flatten()
        count = -(-len(own) // block_size)
        rows.append(torch.cat((own, own.new_full((count * block_size - len(own),), flat.numel()))))
        blocks += [expert if expert_map is None else int(expert_map[expert])] * count
    order = torch.cat(rows)
    sorted_ids.fill_(flat.numel())
    sorted_ids[: len(order)] = order.to(sorted_ids.dtype)
    experts.fill_(-1 if expert_map is not None else 0)
    experts[: len(blocks)] = torch.tensor(blocks, dtype=experts.dtype)
    total.fill_(len(order))


def moe_sum(input, output, topk_ids=None, expert_map=None):
    """Over the experts of each token: [T, K, H] to [T, H]."""
    output.copy_(input.float().sum(1))


EXPERT_OPERATORS = {
    "topk_softmax": topk_softmax,
    "topk_sigmoid": topk_sigmoid,
    "moe_align_block_size": moe_align_block_size,
    "moe_sum": moe_sum,
}


def experts_matmul(
    A: Tensor,
    B: Tensor,
    C: Tensor,
    A_scale: Tensor | None,
    B_scale: Tensor | None,
    topk_weights: Tensor | None,
    sorted_token_ids: Tensor | None,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor | None,
    mul_routed_weight: bool,
    top_k: int,
    config: dict[str, Any],
    B_bias: Tensor | None = None,
    **_: object,
) -> None:
    """C [choices, N] := of each choice, its token in A [T, H] times its expert in B [E, N, H]."""
    if A_scale is not None or B_scale is not None:
        raise NotImplementedError("emulated CUDA: quantized experts")
    out, choices = C.view(-1, C.shape[-1]), A.shape[0] * top_k
    if sorted_token_ids is None:
        chosen, experts = torch.arange(choices), expert_ids[:choices]
    else:
        chosen = sorted_token_ids[: int(num_tokens_post_padded)].long()
        experts = expert_ids.repeat_interleave(config["BLOCK_SIZE_M"])[: len(chosen)]
        experts, chosen = experts[chosen < choices], chosen[chosen < choices]
    for expert in experts.unique().tolist():
        rows = chosen[experts == expert]
        if expert < 0:  # of another rank
            out[rows] = 0
            continue
        made = A[rows // top_k].float() @ B[expert].float().t()
        if B_bias is not None:
            made += B_bias[expert]
        if mul_routed_weight:
            made *= topk_weights.flatten()[rows, None]
        out[rows] = made.to(C.dtype)
