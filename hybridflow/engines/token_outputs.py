"""TokenOutputs: turns rows into micro-batches, and the head's outputs into log-probabilities, entropy and values.

Shapes: B rows, R response tokens, N tokens of a micro-batch that are read, V this rank's columns of the vocabulary, H
hidden (of a teacher).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.algorithms.logits import BLOCK_BYTES, Columns, Logits
from hybridflow.algorithms.losses.distillation import TEACHER
from hybridflow.algorithms.masked import response_mask, token_column, with_bool_mask
from hybridflow.algorithms.trajectories import trajectories_of
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.engines.contract import Output
from hybridflow.engines.micro_batches import MicroBatch, Positions, Split
from hybridflow.engines.rank_exchanges import ContextParallel
from hybridflow.engines.router_replay import ROUTING
from hybridflow.errors import BatchError, ModelError, of_row
from hybridflow.models.hf_spec import Decoder
from hybridflow.models.images import GRIDS, PIXELS

_BLOCK_BYTES = 4 * BLOCK_BYTES  # larger ones: a device launches fewer kernels


class TokenOutputs:
    """Outputs of one rank's model (`role`): `vocabulary` is the range of token ids whose columns it has, and `group`
    the ranks that share the vocabulary.

    `teacher` [V, H] are the same columns of a teacher's output layer, on the device; set where a loss reads
    `ref_logits`. `context` are the ranks that share rows. `replays`: where tokens go to the experts of the column
    `routed_experts`, the layers with experts, how many each token goes to and how many there are.
    """

    def __init__(
        self, role: str, spec: Decoder, split: Split, vocabulary: tuple[int, int], group: dist.ProcessGroup
    ) -> None:
        self.role, self.spec, self.split, self.vocabulary, self.group = role, spec, split, vocabulary, group
        self.columns = Columns(*vocabulary, spec.vocab, group)
        self.teacher: Tensor | None = None
        self.replays: tuple[int, int, int] | None = None
        self.context: ContextParallel | None = None

    def check(
        self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0, without_loss: bool = False
    ) -> None:
        """Without any collective. Errors: ModelError for an output that the model's head does not give, BatchError for
        a temperature of 0, a row without a prompt, or longer than the positions that the model has learned, an unknown
        token id, or a mask that does not fit the response."""
        given = ("values",) if self.spec.head == "value" else ("log_probs", "entropy", "logits", "ref_logits")
        if not outputs or (wrong := [name for name in outputs if name not in given]):
            asked = ", ".join(map(repr, wrong if outputs else outputs)) or "no output"
            raise ModelError(
                f"{self.role} was asked for {asked}; a model with head={self.spec.head!r} gives "
                f"{' and '.join(map(repr, given))}."
            )
        if without_loss and (wrong := [name for name in outputs if name in ("logits", "ref_logits")]):
            raise ModelError(
                f"{self.role}: forward was asked for {wrong[0]!r}, which only a loss gets: one value per token and "
                f"entry of the vocabulary is not kept. Use a loss with outputs=({wrong[0]!r},), or compute_ref_top_k."
            )
        if not (temperature > 0 and math.isfinite(temperature)):
            raise BatchError(f"temperature={temperature!r} must be above 0: log-probabilities are divided by it.")
        if self.context is not None and (wrong := [name for name in outputs if name in ("logits", "ref_logits")]):
            raise ModelError(f"{self.role}: no rank of cp={self.context.size} has the {wrong[0]} of a row. Use cp=1.")
        self._check_images(batch)
        self.split.check(token_column(batch, "prompt_ids"), token_column(batch, "response_ids"))
        self._check_routing(batch)
        _ = response_mask(batch)
        self._check_lengths(batch)
        if "ref_logits" in outputs and self.teacher is not None:
            states = token_column(batch, TEACHER, token_column(batch, "response_ids"))
            if states.values.shape[1:] != self.teacher.shape[1:]:
                raise BatchError(
                    f"{TEACHER} has {list(states.values.shape[1:])} numbers per token, the output layer of the teacher "
                    f"of {self.role} takes {self.teacher.shape[1]}. Give the reference and teacher= the same model."
                )

    @contextmanager
    def own_routing(self) -> Iterator[None]:
        """Inside, routers choose the experts."""
        replays, self.replays = self.replays, None
        try:
            yield
        finally:
            self.replays = replays

    def _check_routing(self, batch: Batch) -> None:
        if self.replays is None:
            return
        layers, each, count = self.replays
        routing = batch.peek(ROUTING) if ROUTING in batch else None
        if not isinstance(routing, Ragged) or tuple(routing.values.shape[1:]) != (layers, each):
            shape: Any = () if routing is None else getattr(routing, "values", routing)
            found = "no such column" if routing is None else f"{list(getattr(shape, 'shape', ()))[1:]}"
            raise BatchError(
                f"{self.role} replays the experts of {ROUTING}, ragged [tokens, {layers}, {each}], and found {found}. "
                f"Generate with VLLM(return_routed_experts=True) of the same model, or leave replay_routing= out."
            )
        tokens = token_column(batch, "prompt_ids").lengths + token_column(batch, "response_ids").lengths
        if len(longer := (routing.lengths > tokens).nonzero()):
            raise of_row(int(longer[0]), f"has {ROUTING} of more tokens than it has.")
        if routing.values.numel() and (int(routing.values.max()) >= count or int(routing.values.min()) < 0):
            raise BatchError(f"{ROUTING} has experts of another model: {self.role} has {count} per layer.")

    def _check_images(self, batch: Batch) -> None:
        """Errors: BatchError for images that the model does not read, for rows whose tokens do not fit them, and for
        tokens of images that are trained on."""
        found = [token_column(batch, name) for name in (PIXELS, GRIDS) if name in batch]
        prompts, responses = (token_column(batch, name) for name in ("prompt_ids", "response_ids"))
        tokens = self.split.images
        if tokens is None:
            if any(len(column.values) for column in found):
                raise BatchError(
                    f"{self.role} is a {self.spec.family} model, which reads text only, and the batch has images "
                    f"({PIXELS}). Use a model that reads images, or drop the column."
                )
            return
        observed = ~response_mask(batch).values if "response_mask" in batch else torch.tensor(True)
        allowed = (responses.values != tokens.special[1]) & ((responses.values != tokens.token) | observed)
        if len(wrong := (~allowed).nonzero()):
            row = int(responses.row_index()[wrong[0, 0]])
            raise of_row(row, "has a token of an image in its response, which only prompts and observations can have.")
        counts = [ids.with_values((ids.values == tokens.token).long()).row_sum() for ids in (prompts, responses)]
        seen = counts[0] + counts[1]
        patches = counted = odd = torch.zeros_like(seen)
        if len(found) == 2:
            pixels, grids = found
            if any(row.shape[1:] != (tokens.patch,) for row in pixels.rows()) or grids.values.shape[1:] != (3,):
                raise BatchError(
                    f"{self.role} reads {PIXELS} of {tokens.patch} numbers per patch and {GRIDS} of 3, and found "
                    f"{sorted({*(tuple(row.shape[1:]) for row in pixels.rows())})} and {list(grids.values.shape[1:])}. "
                    f"Give PromptLoader(processor=) the processor of this model."
                )
            patches, counted = pixels.lengths, grids.with_values(grids.values.prod(-1)).row_sum()
            odd = grids.with_values((~tokens.fits(grids.values)).long()).row_sum()
        wrong = ((seen * tokens.merge**2 != counted) | (patches != counted) | (odd > 0)).nonzero()[:, 0].tolist()
        for row in wrong:
            raise of_row(
                row,
                f"has {int(seen[row])} tokens of images, {GRIDS} of {int(counted[row])} patches and "
                f"{PIXELS} of {int(patches[row])}, of which {tokens.merge}x{tokens.merge} are a token ({len(wrong)} of "
                f"{len(batch)} rows do not fit). Give PromptLoader(processor=), which makes all three.",
            )

    def _check_lengths(self, batch: Batch) -> None:
        if not self.spec.learned_positions or not len(batch):
            return
        lengths = token_column(batch, "prompt_ids").lengths + token_column(batch, "response_ids").lengths
        row = int(lengths.argmax())
        if (longest := int(lengths[row])) > self.spec.context:
            raise of_row(
                row,
                f"has {longest} tokens, this {self.spec.family} model has learned {self.spec.context} positions. Use "
                f"shorter prompts or a smaller max_tokens.",
            )

    def micro_batches(
        self, batch: Batch, at: Positions = "before", loss: Callable[..., Any] | None = None
    ) -> list[MicroBatch]:
        """The batch as micro-batches that say which positions are read; trajectories stay whole where `loss` has terms
        of them."""
        prompts, responses = token_column(batch, "prompt_ids"), token_column(batch, "response_ids")
        whole = None if loss is None else trajectories_of(loss, batch)
        routing: Any = None if self.replays is None else batch.peek(ROUTING)
        images = (token_column(batch, PIXELS), token_column(batch, GRIDS)) if GRIDS in batch else None
        if self.split.images is None:
            images = None  # without any, as checked
        found = self.split.micro_batches(prompts, responses, at, whole and whole.rows, routing, images)
        return found if self.context is None else [self.context.local(micro) for micro in found]

    def pooled(self, batch: Batch) -> tuple[Batch, Tensor | None]:
        """The rows that this rank computes a part of, and which of them are its own (None: all). Collective over the
        ranks that share rows."""
        return (batch, None) if self.context is None else self.context.pool(batch)

    def laid_out(self, batch: Batch, loss: Callable[..., Any]) -> tuple[Batch, Batch, list[MicroBatch]]:
        """A mini-batch, its `pooled` rows, and these as micro-batches."""
        rows, _ = self.pooled(batch)
        return batch, rows, self.micro_batches(rows, loss=loss)

    def empty(self) -> MicroBatch:
        """A micro-batch without rows."""
        found = self.split.empty()
        return found if self.context is None else self.context.local(found)

    @staticmethod
    def with_columns(micro: MicroBatch, batch: Batch, loss: Callable[..., Any]) -> MicroBatch:
        """A micro-batch of `micro_batches(batch, loss=loss)` with what `loss` reads: a trajectory is one row where it
        has terms of them."""
        batch = batch.select(name for name in batch.columns if name not in (PIXELS, GRIDS))  # the model has read them
        rows = with_bool_mask(batch if micro.rows.equal(torch.arange(batch.rows)) else batch.reorder(micro.rows))
        if (whole := trajectories_of(loss, rows)) is not None:
            assert whole.order.equal(torch.arange(len(rows))), "rows of a trajectory follow each other"
            rows = whole.join(rows)
        return replace(micro, columns=rows, lengths=token_column(rows, "response_ids").lengths)

    def ragged(
        self, micro: MicroBatch, head: Tensor, names: Sequence[Output], temperature: float
    ) -> dict[str, Ragged | Logits]:
        """Each asked output of a micro-batch `with_columns`, for a loss: ragged [R], or `Logits`."""
        asked, found = [name for name in names if name not in ("logits", "ref_logits")], dict[str, Ragged | Logits]()
        if len(asked) == len(names):
            flat = self.read(micro, head, names, temperature)
        else:  # the blocks of `logits` are the only ones, so they give the other outputs as well
            logits = found["logits"] = self.logits(micro, head, temperature)
            flat = {name: logits.entropy() if name == "entropy" else logits.log_probs(micro.targets) for name in asked}
        if "ref_logits" in names:
            assert self.teacher is not None
            assert micro.columns is not None
            states = token_column(micro.columns, TEACHER).values
            found["ref_logits"] = Logits(states, self.columns, temperature, weight=self.teacher)
        return found | {name: Ragged.from_lengths(value, micro.lengths) for name, value in flat.items()}

    def logits(self, micro: MicroBatch, head: Tensor, temperature: float) -> Logits:
        """The distributions of a micro-batch, from the output layer's [N or more, V or more]."""
        return Logits(head, self.columns, temperature, tokens=micro.selected)

    def top_k(self, micro: MicroBatch, head: Tensor, k: int, temperature: float) -> dict[str, Tensor]:
        """The k most probable tokens at each position: see `Logits.top_k`."""
        ids, log_probs, rest = self.logits(micro, head, temperature).top_k(k)
        return self._joined(micro, {"top_ids": ids.to(torch.int32), "top_log_probs": log_probs, "tail_log_probs": rest})

    def hidden_states(self, micro: MicroBatch, rows: Tensor) -> dict[str, Tensor]:
        """[N, H] of a micro-batch, from the input of the output layer."""
        return self._joined(micro, {"hidden_states": rows[: micro.selected]})

    def _joined(self, micro: MicroBatch, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """At the positions of all ranks that share the micro-batch."""
        return {n: v if self.context is None else self.context.joined(micro, v) for n, v in found.items()}

    def read(self, micro: MicroBatch, rows: Tensor, names: Sequence[Output], temperature: float) -> dict[str, Tensor]:
        """Each asked output [N] float32 of a micro-batch from the output layer's [N or more, V or more]."""
        rows = rows[: micro.selected]
        if self.spec.head == "value":
            return self._joined(micro, {"values": rows[:, 0].float()})
        first, last = self.vocabulary
        log_probs, entropy = vocab_parallel_log_probs(
            rows[:, : last - first], micro.targets, first, self.group, temperature, "entropy" in names
        )
        found = {"log_probs": log_probs, "entropy": entropy}
        return self._joined(micro, {name: found[name] for name in names})  # type: ignore[misc]


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
    dH/dx = -p (log p + H) / T. Only the logits are kept: p exists for a block of tokens at a time, and again in the
    backward pass."""

    @staticmethod
    def forward(ctx, logits_NV, targets_N, first, group, temperature, entropy):
        split = group.size() > 1
        n, columns = logits_NV.shape
        peak_N1 = (
            logits_NV.amax(-1, keepdim=True).float() if columns else logits_NV.new_full((n, 1), -torch.inf).float()
        )
        if split:
            dist.all_reduce(peak_N1, dist.ReduceOp.MAX, group=group)
        local_N = targets_N - first
        inside_N = (local_N >= 0) & (local_N < columns)
        column_N1 = torch.where(inside_N, local_N, 0)[:, None]
        sums_3N = peak_N1.new_zeros(3, n)
        for at in _blocks(logits_NV):
            x_nV = _shifted(logits_NV, peak_N1, temperature, at)
            if columns:
                sums_3N[1, at] = torch.where(inside_N[at], x_nV.gather(1, column_N1[at])[:, 0], 0.0)
            p_nV = x_nV.exp() if entropy else x_nV.exp_()
            sums_3N[0, at] = p_nV.sum(-1)
            if entropy:
                sums_3N[2, at] = x_nV.mul_(p_nV).sum(-1)
        if split:
            dist.all_reduce(sums_3N, group=group)
        total_N, picked_N, weighted_N = sums_3N
        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N if entropy else total_N.new_zeros(0)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits_NV, peak_N1, total_N, inside_N, column_N1, entropy_N)
            ctx.temperature, ctx.entropy = temperature, entropy
        return picked_N - log_total_N, entropy_N

    @staticmethod
    def backward(ctx, d_log_probs_N, d_entropy_N):  # type: ignore[override]
        logits_NV, peak_N1, total_N, inside_N, column_N1, entropy_N = ctx.saved_tensors
        d_NV, chosen_N1 = torch.empty_like(logits_NV), torch.where(inside_N, d_log_probs_N, 0.0)[:, None]
        for at in _blocks(logits_NV):
            p_nV = _shifted(logits_NV, peak_N1, ctx.temperature, at).exp_().div_(total_N[at, None])
            d_nV = torch.mul(p_nV, -d_log_probs_N[at, None], out=None if ctx.entropy else p_nV)
            if logits_NV.shape[1]:
                d_nV.scatter_(1, column_N1[at], d_nV.gather(1, column_N1[at]) + chosen_N1[at])
            if ctx.entropy:
                d_nV += (torch.special.entr(p_nV) - p_nV * entropy_N[at, None]) * d_entropy_N[at, None]
            d_NV[at] = d_nV if ctx.temperature == 1.0 else d_nV.div_(ctx.temperature)
        return d_NV, None, None, None, None, None


def _blocks(logits_NV: Tensor) -> list[slice]:
    """Tokens in parts whose [n, V] in float32 are `_BLOCK_BYTES`; up to four exist at once."""
    n, columns = logits_NV.shape
    size = max(1, _BLOCK_BYTES // (4 * max(1, columns)))
    return [slice(start, start + size) for start in range(0, n, size)]


def _shifted(logits_NV: Tensor, peak_N1: Tensor, temperature: float, at: slice) -> Tensor:
    """[n, V] float32: (logits - peak) / temperature."""
    x_nV = logits_NV[at] - peak_N1[at]  # float32 in one pass, as the peak is
    return x_nV if temperature == 1.0 else x_nV.div_(temperature)
