"""Agreement: the ranks of a group continue together or all raise, so no rank waits in a collective for a failed one;
all make an optimizer step or all skip it, and stop where they only skip; what a failed operation leaves; and sums over
data parallel ranks."""

from __future__ import annotations

import datetime
import logging
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow import config
from hybridflow.algorithms.logits import Logits
from hybridflow.algorithms.losses.loss import LossFunction, Totals
from hybridflow.algorithms.masked import not_finite, response_mask
from hybridflow.algorithms.trajectories import Trajectories
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.engines.process_groups import RankContext, SkippedStep, gather, is_communication_error
from hybridflow.errors import (
    BatchError,
    BrokenGroupError,
    DeviceMemoryError,
    DivergenceError,
    HybridFlowError,
    WaitTimeoutError,
    WorkerError,
    rank_at,
)

F = TypeVar("F")
FAIL_SECONDS = 10.0
"""In which peers that fail as well, or are not waiting for this rank, have come to agree with it."""


def agree_on(
    group: dist.ProcessGroup, failure: F | None, number: float | None = None, seconds: float | None = None
) -> tuple[F | None, float, float]:
    """One tiny all-reduce over a gloo group: the failure of the first rank that has one, the least and the largest
    number of all ranks (inf and -inf when no rank has one).

    Errors: WaitTimeoutError when not all ranks come within `seconds` (None: the group's timeout, and its error).
    """
    largest, smallest = (-math.inf, -math.inf) if number is None else (number, -number)
    state = torch.tensor([failure is not None, largest, smallest], dtype=torch.float64)
    work: Any = dist.all_reduce(state, dist.ReduceOp.MAX, group=group, async_op=True)
    if seconds is None:
        work.wait()
    else:
        try:
            work.wait(datetime.timedelta(seconds=seconds))
        except RuntimeError as error:
            raise WaitTimeoutError(f"the other ranks did not come within {seconds:g} s to agree.") from error
    failed, largest, smallest = state.tolist()
    if failed:
        failure = next(found for found in gather(failure, group) if found is not None)
    return failure, -smallest, largest


def agree(
    context: RankContext, check: Callable[[], float | None], what: str = "a number", seconds: float | None = None
) -> float | None:
    """Run `check` on every rank of the group; one tiny all-reduce on the CPU.

    Returns the number from `check`, equal on all ranks: a rank with None takes the others' number.

    Errors: the error that `check` raised, on a group of one rank. On a larger one the *same* WorkerError (with the
    failing rank and its error as the cause) on every rank; also when the numbers, which are called `what`, differ.
    A rank that ran out of device memory raises that itself. With `seconds` as `agree_on`; a rank that has failed and
    whose peers do not come raises its own error.
    """
    number, error = None, None
    try:
        number = check()
    except Exception as raised:  # any error: the other ranks must know before anything else
        error = raised
        traceback.clear_frames(error.__traceback__)  # which hold the activations of a failed pass
    if context.grid.size == 1:
        if error is not None:
            raise error
        return number
    try:
        failure, smallest, largest = agree_on(_group(context), error and error_of(context, error), number, seconds)
    except (RuntimeError, WaitTimeoutError) as late:
        if error is None:
            raise
        raise error from late
    if failure is None and smallest < largest:
        differs = BatchError(f"{what} differs between the ranks' rows: from {smallest:g} to {largest:g}.")
        failure = of_every_rank(context, error_of(context, differs))[0]
    if failure is not None:
        memory = isinstance(error, torch.OutOfMemoryError | DeviceMemoryError)
        raise error if memory and error is not None else failure  # the host adds what is in its memory
    return None if largest == -math.inf else largest


def of_every_rank(context: RankContext, mine: Any) -> list[Any]:
    """The values of all ranks, in rank order. Collective, on the CPU."""
    return [mine] if context.grid.size == 1 else gather(mine, _group(context))


def _group(context: RankContext) -> dist.ProcessGroup:
    return context.groups.new("agreement", range(context.grid.size), "gloo")


def error_of(context: RankContext, error: BaseException) -> WorkerError:
    """An error of this rank, as the others raise it."""
    where = f"{context.role}.{context.method}".rstrip(".")
    return WorkerError(
        f"{where} failed on {rank_at(context.rank, context.node, context.step)}: {type(error).__name__}: {error}",
        role=context.role,
        rank=context.rank,
        method=context.method,
        node=context.node,
        step=context.step,
        cause=error if isinstance(error, HybridFlowError) else None,  # these survive pickling
        remote_traceback="".join(traceback.format_exception(error)),
    )


Settle = Callable[[Exception | None, float | None], object]
"""Agrees with all ranks on this rank's error, waiting for them at most these seconds; raises when any has one."""


def random_state(device: torch.device) -> list[Tensor]:
    """Of the generators that dropout draws from: those of the host and of a CUDA device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


class Operations:
    """Enters and leaves the operations of one rank's engine.

    Afterwards all ranks have made the operation; or all raise, and their engines are as they were before it; or, where
    that is not certain, the engine is broken and refuses every further operation. An error whose peers may be waiting
    for this rank is raised on it alone, and they raise when their wait ends.
    """

    def __init__(self, context: RankContext) -> None:
        self._context, self._broken = context, ""
        self._before: Mapping[str, int] = {}  # collectives of each group when the operation began
        self._several = context.grid.size > 1

    def check(self) -> None:
        """Errors: BrokenGroupError."""
        if self._broken:
            raise BrokenGroupError(self._broken)

    @contextmanager
    def run(
        self, name: str, undo: Callable[[], object], lockstep: bool = True, settle: Settle | None = None
    ) -> Iterator[None]:
        """The operation `name`. `undo()` restores this rank after a failure on any rank, or raises where it cannot.

        `lockstep`: while this rank raises, peers may be inside a collective that it has not begun. The agreement at the
        end is one tiny all-reduce on the CPU, or `settle`.
        """
        self.check()
        self._before = self._context.groups.collectives() if self._several else {}
        try:
            yield
            self._context.groups.check()
            error = None
        except Exception as raised:
            error = raised
        except BaseException as raised:  # interrupted: nothing is known of the peers
            self._break(name, raised, "it was interrupted")
            raise
        failure, why = self._left(error, undo, lockstep, settle or self._agree)
        if failure is not None:
            if why:
                self._break(name, failure, why)
            raise failure

    def _left(
        self, error: Exception | None, undo: Callable[[], object], lockstep: bool, settle: Settle
    ) -> tuple[Exception | None, str]:
        """The error of any rank (None: all have succeeded), and why it could not be undone ("": it was)."""
        if self._several and _lost(error):
            return error, "its peers did not fail as well, or are gone"
        known = isinstance(error, WorkerError)  # agreed on before the ranks have computed anything
        if not known:
            try:
                settle(error, FAIL_SECONDS if lockstep and error is not None and self._several else None)
                return None, ""
            except Exception as found:
                if self._several and _lost(found):
                    return error or found, "its peers did not fail as well, or are gone"
                error = found
        return error, self._undone(undo, together=self._several and not known)

    def _agree(self, error: Exception | None, seconds: float | None) -> None:
        def check() -> None:
            if error is not None:
                raise error

        agree(self._context, check, seconds=seconds)

    def _undone(self, undo: Callable[[], object], together: bool) -> str:
        """Undo on this rank, with `together` on all. Returns why the state is unknown, the same on all; "" if it is
        not."""
        groups, device = self._context.groups, self._context.device

        def mine() -> str:
            try:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                    groups.check()
                undo()
            except Exception as error:  # any: peers wait for the answer
                return f"{type(error).__name__}: {error}"
            return ""

        if not together:
            return mine()
        try:
            begun = {name: count - self._before.get(name, 0) for name, count in groups.collectives().items()}
            if unlike := _unlike(of_every_rank(self._context, begun)):
                return f"its ranks had begun different collectives ({unlike})"
            return next(filter(None, of_every_rank(self._context, mine())), "")
        except Exception as error:  # a peer that is gone
            return f"{type(error).__name__}: {error}"

    def _break(self, name: str, error: BaseException, why: str) -> None:
        self._broken = (
            f"{self._context.role} cannot be used any more: {name} failed ({type(error).__name__}: {str(error)[:200]}) "
            f"and was not undone on all ranks, because {why}. Build the group again and continue from a checkpoint."
        )


def _lost(error: Exception | None) -> bool:
    """Whether this rank has no peers, or only such that are inside a collective that it has left."""
    late = isinstance(error, WaitTimeoutError) or (error is not None and isinstance(error.__cause__, WaitTimeoutError))
    return late or is_communication_error(error)


def _unlike(counts: Sequence[Mapping[str, int]]) -> str:
    """The groups in which not all ranks that share them have begun equally many collectives."""
    first: dict[str, int] = {}
    found = {name for rank in counts for name, count in rank.items() if first.setdefault(name, count) != count}
    return ", ".join(f"{n} {[rank.get(n) for rank in counts]}" for n in sorted(found))


class Replicas:
    """The ranks that hold the same weights as this one and other rows. Their numbers travel by gloo, on the CPU."""

    def __init__(self, context: RankContext) -> None:
        self.size = context.grid.d
        self.group = context.groups.new("replicas", context.grid.group(context.rank, "d"), "gloo")

    def totals(self, batch: Batch) -> Totals:
        """The mini-batch's totals over all replicas; without a `response_mask` every response token counts. The rows
        of a trajectory are on one replica."""
        mask = response_mask(batch)
        prompts: Any = batch.peek("prompt_ids")
        tokens, every = int(mask.values.sum()), len(prompts.values) + len(mask.values)
        sequences = mask if (whole := Trajectories.of(batch)) is None else whole.joined(mask)
        longest = int(sequences.lengths.max()) if batch.rows else 0
        counts = torch.tensor([tokens, len(sequences), every, longest], dtype=torch.float64, device="cpu")
        found = counts.expand(self.size, -1).contiguous()
        if self.size > 1:
            dist.all_gather_single(found.view(-1), counts, group=self.group)
        return Totals(*found[:, :3].sum(0).tolist(), longest=float(found[:, 3].max()))

    def most(self, count: int) -> int:
        """The largest `count` of all replicas."""
        largest = torch.tensor(count, device="cpu")
        if self.size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return int(largest)

    def joined(self, shares: Sequence[dict[str, Tensor]], joins: Mapping[str, str]) -> dict[str, float]:
        """Metrics added over micro-batches and replicas, unless `joins` says "max" or "min" for their name; a replica
        without rows does not know their names."""
        names = list(dict.fromkeys(name for share in shares for name in share))
        sums: dict[str, float] = {}
        if names:
            values = [torch.stack([share[name].double() for share in shares if name in share]) for name in names]
            own = [getattr(value, joins.get(name, "sum"))() for name, value in zip(names, values, strict=True)]
            sums = dict(zip(names, torch.stack(own).tolist(), strict=True))
        if self.size == 1:
            return sums
        everyone = gather(sums, self.group)
        keys = dict.fromkeys(name for other in everyone for name in other)
        given = {name: [other[name] for other in everyone if name in other] for name in keys}
        return {name: REDUCTIONS[joins.get(name, "sum")](values) for name, values in given.items()}


REDUCTIONS: Mapping[str, Callable[[Iterable[float]], float]] = {"sum": sum, "max": max, "min": min}
_NAMED = 3  # findings in the text of a refusal


class StepCheck:
    """Checks the mini-batches between two steps: all ranks skip the next step when a number that it depends on is not
    finite on any rank.

    Checking the gradients is not enough: `maximum`, `clamp` and `where` can drop a nan or an infinity between the
    inputs of a loss and its gradients, which are then finite and wrong.

    While `others` are set, an error of their computations stops this one's steps, too.

    Call `begin` for each mini-batch, `share` for each micro-batch, then `agree`. `agree` uses the all-reduce in which
    ranks report errors, so the check needs no further communication until a rank finds something.
    """

    def __init__(self, context: RankContext) -> None:
        self._context, self.others = context, list[StepCheck]()
        if context.grid.p > 1:
            _group(context)  # two models that share stages would build theirs at the same time, and wait for each other
        self._columns, self._refusal, self._taken = "", "", ""
        self._errors: list[BaseException] = []
        self._finite: dict[str, list[Tensor]] = {}

    def beside(self, others: Sequence[StepCheck]) -> None:
        """Set `others` for an update that begins: errors of an earlier one are over."""
        self.others, self._errors = list(others), []

    def begin(self, batch: Batch, loss: LossFunction) -> None:
        """Check the columns that `loss` reads (its attribute `reads`; without it, all columns)."""
        self._errors, self._finite, self._columns = [], {}, ""
        try:
            self._columns = not_finite(batch, getattr(loss, "reads", None))
        except Exception as error:  # told by `agree`: peers need this rank in the pass
            self._errors.append(error)

    def share(
        self, loss: LossFunction, outputs: Mapping[str, Ragged], rows: Batch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """The result of `loss` for a micro-batch; None when it raises, because peers need this rank in the pass.

        Errors: what leaves a collective of the loss over the vocabulary unfinished, on this rank alone.
        """
        try:
            scalar, metrics = loss(outputs, rows, totals)
            valid = response_mask(rows).values
            for name, output in outputs.items():
                kept = torch.where(valid, output.values.detach(), 0.0)
                self._finite.setdefault(f"the model's {name}", []).append(kept.isfinite().all())
            self._finite.setdefault("the loss", []).append(scalar.detach().isfinite().all())
            return scalar, {name: value.detach() for name, value in metrics.items()}
        except Exception as error:
            alone = isinstance(error, torch.OutOfMemoryError) or is_communication_error(error)
            if alone and any(isinstance(output, Logits) and output.columns.group for output in outputs.values()):
                raise
            self._errors.append(error)
            return None

    def failed(self, error: BaseException | None) -> None:
        """Have `agree` raise this error, if any, on all ranks, and so the checks of `others`."""
        self._errors += [] if error is None else [error]

    def agree(self, error: Exception | None = None, seconds: float | None = None) -> None:
        """Share the findings of all ranks. Errors: as `agreement.agree`, when the loss raised on a rank."""
        self.failed(error)
        mine = ""

        def check() -> float | None:
            nonlocal mine
            if self._errors:
                raise self._errors[0]
            for other in self.others:
                if other._errors:
                    raise error_of(other._context, other._errors[0])
            mine = self._columns or self._computed()
            return 1.0 if mine else None

        try:
            refused = agree(self._context, check, seconds=seconds) is not None
        except Exception:
            self._refusal = ""  # the engine drops the gradients
            if not self.others:
                self._errors = []  # they hold the activations of what has failed
            raise
        if refused:
            self._refusal = self._refusal or _joined(of_every_rank(self._context, mine))

    def _computed(self) -> str:
        """Names the model outputs and the loss of this rank that are not finite; "" when all are finite."""
        if not self._finite:
            return ""
        finite = torch.stack([torch.stack(found).all() for found in self._finite.values()]).tolist()
        bad = [name for name, good in zip(self._finite, finite, strict=True) if not good]
        return f"{' and '.join(bad)} {'is' if len(bad) == 1 else 'are'} not finite" if bad else ""

    def take(self) -> bool:
        """Whether to skip the step that follows, the same on all ranks; resets the check for the next step."""
        self._taken, self._refusal = self._refusal, ""
        return bool(self._taken)

    def reason(self, result: Mapping[str, float]) -> str:
        """Why the step that returned `result` was skipped; "" when it was not."""
        if not result["skipped"]:
            return ""
        return self._taken or f"the norm of the gradients is {result['grad_norm']}"


def _joined(findings: list[str]) -> str:
    """The findings of all ranks in one line; ranks with equal findings are grouped."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(findings):
        if text:
            ranks.setdefault(text, []).append(rank)
    said = [f"{text} on rank {', '.join(map(str, where))}" for text, where in list(ranks.items())[:_NAMED]]
    return "; ".join(said) + (f"; and more on {len(ranks) - _NAMED} other ranks" if len(ranks) > _NAMED else "")


logger = logging.getLogger(__name__)


class SkippedSteps:
    """Counts the steps in a row that were skipped for numbers that are not finite, over all calls of a worker."""

    def __init__(self, context: RankContext, settings: config.Optimizer | None) -> None:
        self._context, self._settings, self.streak = context, settings, 0

    @property
    def diverged(self) -> bool:
        """Whether the last `max_skipped` steps were skipped; equal on all ranks."""
        most = None if self._settings is None else self._settings.max_skipped
        return most is not None and self.streak >= most

    def made(self) -> None:
        """A step was made."""
        self.streak = 0

    def skipped(self, number: int, steps: int, reason: str, row_ids: Sequence[int], overflow: bool) -> None:
        """Step `number` of the call's `steps` was skipped, on all ranks; `row_ids` are this rank's rows. Collective.

        An `overflow` of float16, which the loss scale cures, neither counts nor ends a streak. Errors: DivergenceError
        on all ranks after `max_skipped` steps in a row.
        """
        context, settings = self._context, self._settings
        ids = dict.fromkeys(row for rows in of_every_rank(context, tuple(row_ids)) for row in rows)
        where = (context.role, context.method, context.step, context.call)
        context.skipped.append(SkippedStep(*where, number, reason, tuple(ids)))
        if context.rank == 0:
            logger.warning(
                "%s.%s skipped step %d of %d; no weight and no optimizer state has changed: %s.",
                *(context.role, context.method, number, steps, reason),
            )
        self.streak += not overflow
        if not self.diverged:
            return
        assert settings is not None
        raise DivergenceError(
            f"{context.role} skipped {self.streak} optimizer steps in a row, the last because {reason}. Its weights "
            f"are those of the last step that was made, which may have broken them: continue from a checkpoint before "
            f"it. Use a lower lr (now {settings.lr:g}), more warmup_steps or a smaller clip_grad (now "
            f"{settings.clip_grad:g}), and look at the rows that skipped.jsonl in the run directory names. "
            f"{type(settings).__name__}(max_skipped=...) sets the number; None never stops."
        )
