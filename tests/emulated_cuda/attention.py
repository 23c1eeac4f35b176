"""Attention in plain torch, on CPU tensors: what CUDA's flash, efficient, cuDNN and varlen kernels compute.

Shape letters: B rows, N heads, L queries, S keys, D head size. The kernels store [B, L, N, D] and return that memory
as [B, N, L, D].
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def visible(queries: int, keys: int, causal: bool, left: int = -1, right: int = -1) -> Tensor:
    """[L, S]: the last query sees the last key. `left`, `right`: the window; -1: no limit."""
    i, j = torch.arange(queries)[:, None] + (keys - queries), torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, seen: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[..., N, L, D] in float32, and the log-sum-exp of the logits."""
    heads, groups = q.shape[-3], k.shape[-3]
    if heads != groups:
        k, v = k.repeat_interleave(heads // groups, -3), v.repeat_interleave(heads // groups, -3)
    logits = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias.float()
    logits = logits.masked_fill(~seen, float("-inf"))
    return logits.softmax(-1).nan_to_num() @ v.float(), logits.logsumexp(-1)


def gradients(forward: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """By autograd, on a thread of its own: it is excluded inside a kernel of a backend."""
    made: list[tuple[Tensor, ...]] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            leaves = [x.detach().clone().requires_grad_() for x in inputs]
            with torch.enable_grad():
                out = forward(*leaves)
            made.append(torch.autograd.grad(out, leaves, grad.to(out.dtype)))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return tuple(made_.to(x.dtype) for made_, x in zip(made[0], inputs))


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> tuple:
    out, lse = attend(q, k, v, scale, visible(q.shape[-2], k.shape[-2], causal), bias)
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse


def dense_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: Any
) -> tuple:
    seen = visible(q.shape[-2], k.shape[-2], causal)
    return gradients(lambda q, k, v: attend(q, k, v, scale, seen, bias)[0], grad.float(), q, k, v)


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse = dense(query, key, value, None, is_causal, scale)
    state = empty(2, dtype=torch.uint64), empty(0, dtype=torch.uint64), empty(0, dtype=query.dtype)
    return out, lse, empty(0), empty(0), query.shape[-2], key.shape[-2], *state


def flash_backward(grad, query, key, value, *rest, scale=None):
    return dense_gradients(grad, query, key, value, None, causal=rest[7], scale=scale)


def efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    out, lse = dense(query, key, value, attn_bias, is_causal, scale)
    return out, lse if compute_log_sumexp else torch.empty(*lse.shape[:-1], 0), empty(), empty()


def efficient_backward(grad, query, key, value, attn_bias, *rest, scale=None):
    causal = len(rest) > 6 and rest[6]
    grads = dense_gradients(grad, query, key, value, attn_bias, causal, scale)
    return *grads, empty(0, dtype=query.dtype)


def cudnn(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    out, lse = dense(query, key, value, attn_bias, is_causal, scale)
    state = empty(), empty(), empty(0, dtype=query.dtype)
    return out, lse[..., None], empty(0), empty(0), query.shape[-2], key.shape[-2], *state


def cudnn_backward(grad, query, key, value, out, lse, seed, offset, attn_bias, *rest, scale=None):
    return dense_gradients(grad, query, key, value, attn_bias, causal=rest[5], scale=scale)


def packed(q, k, v, starts_q, starts_k, causal, scale, left, right) -> tuple[Tensor, Tensor]:
    """[T, N, D] of sequences one after the other; `starts`: cumulative lengths."""
    outs, lses = [], []
    for i in range(len(starts_q) - 1):
        a, b, c, d = int(starts_q[i]), int(starts_q[i + 1]), int(starts_k[i]), int(starts_k[i + 1])
        parts = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        out, lse = attend(*parts, scale, visible(b - a, d - c, causal, left, right))
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, -1)


def window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


def varlen(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    **_,
):
    left, right = window(window_size_left, window_size_right)
    if query.dim() == 4:  # rows of one length
        seen = visible(query.shape[1], key.shape[1], is_causal, left, right)
        out, lse = attend(*(x.transpose(1, 2) for x in (query, key, value)), scale, seen)
        out = out.transpose(1, 2)
    else:
        out, lse = packed(query, key, value, cum_seq_q, cum_seq_k, is_causal, scale, left, right)
    state = empty(2, dtype=torch.uint64), empty(0, dtype=torch.uint64), empty(0, dtype=query.dtype)
    return out.to(query.dtype).contiguous(), lse, *state


def varlen_backward(grad, query, key, value, *rest, scale=None, window_size_left=None, window_size_right=None, **_):
    starts, causal = rest[2:4], rest[7]
    limits = window(window_size_left, window_size_right)
    return gradients(
        lambda q, k, v: packed(q, k, v, *starts, causal, scale, *limits)[0], grad.float(), query, key, value
    )


ATTENTION = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_flash_attention_forward": varlen,
    "_flash_attention_backward": varlen_backward,
}
