"""Log-probabilities and entropy of a vocabulary that is split over tensor parallel ranks.

Shapes: N tokens, V this rank's columns of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_log_probs(
    logits_NV: Tensor,
    targets_N: Tensor,
    first: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) at `targets`, [N] float32, and the entropy of the softmax, [N] float32.

    `logits_NV` are this rank's columns `first : first + V` (any float dtype, without padding columns; V may be 0),
    `targets_N` int64 over the whole vocabulary. All ranks of `group` call with the same N and get equal results. The
    gradient is that of this rank's columns. Computed in float32 with the maximum subtracted; two all-reduces.
    """
    log_probs_N, entropy_N = _VocabParallel.apply(logits_NV, targets_N, first, group, temperature, entropy)
    return log_probs_N, entropy_N if entropy else None


class _VocabParallel(torch.autograd.Function):
    """With p = softmax(x / T), l = log p[target] and H the entropy: dl/dx = (onehot - p) / T and
    dH/dx = -p (log p + H) / T. Only p is kept."""

    @staticmethod
    def forward(ctx, logits_NV, targets_N, first, group, temperature, entropy):
        split = group.size() > 1
        n, columns = logits_NV.shape
        peak_N1 = (
            logits_NV.amax(-1, keepdim=True).float() if columns else logits_NV.new_full((n, 1), -torch.inf).float()
        )
        if split:
            dist.all_reduce(peak_N1, dist.ReduceOp.MAX, group=group)
        x_NV = logits_NV.float() - peak_N1
        if temperature != 1.0:
            x_NV /= temperature
        local_N = targets_N - first
        rows_M = ((local_N >= 0) & (local_N < columns)).nonzero()[:, 0]
        columns_M = local_N[rows_M]
        sums_3N = x_NV.new_zeros(3, n)
        sums_3N[1, rows_M] = x_NV[rows_M, columns_M]
        p_NV = x_NV.exp() if entropy else x_NV.exp_()
        sums_3N[0] = p_NV.sum(-1)
        if entropy:
            sums_3N[2] = x_NV.mul_(p_NV).sum(-1)
        if split:
            dist.all_reduce(sums_3N, group=group)
        total_N, picked_N, weighted_N = sums_3N
        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N if entropy else total_N.new_zeros(0)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(p_NV.div_(total_N[:, None]), rows_M, columns_M, entropy_N)
            ctx.temperature, ctx.entropy, ctx.dtype = temperature, entropy, logits_NV.dtype
        return picked_N - log_total_N, entropy_N

    @staticmethod
    def backward(ctx, d_log_probs_N, d_entropy_N):  # type: ignore[override]
        p_NV, rows_M, columns_M, entropy_N = ctx.saved_tensors
        d_NV = p_NV * -d_log_probs_N[:, None]
        d_NV[rows_M, columns_M] += d_log_probs_N[rows_M]
        if ctx.entropy:
            d_NV += (torch.special.entr(p_NV) - p_NV * entropy_N[:, None]) * d_entropy_N[:, None]
        if ctx.temperature != 1.0:
            d_NV /= ctx.temperature
        return d_NV.to(ctx.dtype), None, None, None, None, None
