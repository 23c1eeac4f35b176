"""The advantage estimators by name: what each reads of a batch, and the pure function that it hands it to.

Shapes: B rows, R response tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from hybridflow.algorithms import whitening
from hybridflow.algorithms.credit import every_token, row_scores, token_rewards
from hybridflow.algorithms.estimator_options import check_values
from hybridflow.algorithms.gae import gae
from hybridflow.algorithms.gdpo import gdpo
from hybridflow.algorithms.gpg import gpg
from hybridflow.algorithms.group import Groups
from hybridflow.algorithms.grpo import dr_grpo, grpo
from hybridflow.algorithms.grpo_passk import grpo_passk
from hybridflow.algorithms.lagrange import LagrangeState
from hybridflow.algorithms.opo import opo
from hybridflow.algorithms.options import check_options, takes_options_of
from hybridflow.algorithms.reinforce import reinforce
from hybridflow.algorithms.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from hybridflow.algorithms.remax import remax
from hybridflow.algorithms.rloo import rloo
from hybridflow.algorithms.safe_rlhf import safe_rlhf
from hybridflow.algorithms.typed_columns import check_finite, mask_column, row_column, token_column
from hybridflow.algorithms.valid_lengths import valid_lengths
from hybridflow.batch import Batch
from hybridflow.errors import BatchError, ConfigError
from hybridflow.ragged import Ragged

EstimatorFunction = Callable[..., tuple[Ragged, Ragged] | Mapping[str, Ragged | Tensor]]
"""`estimator(token_rewards, batch, **options) -> (advantages, returns)`, ragged [B, R] like the response, or a mapping
of columns with these two. Token rewards are float64 for those of this file, float32 for a user's."""

Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """An advantage estimator: its function, and the columns it reads and writes.

    `reads` are those besides rewards and mask (None: every column), or a function of the options that names them;
    `writes` those besides advantages and returns. `kl` says where a KL penalty goes: into the `token_rewards`; `split`
    for a function that is given it as a third argument, ragged [B, R], the reward -kl_coef * kl_t of every token; or
    `unused` by an estimator that does not look at `token_rewards`.
    """

    name: str
    function: EstimatorFunction
    reads: Sequence[str] | Callable[[Options], Sequence[str] | None] | None = ()
    writes: Sequence[str] = ()
    kl: Literal["rewards", "split", "unused"] = "rewards"
    built_in: bool = True

    def columns_read(self, options: Options) -> tuple[str, ...] | None:
        """Columns besides rewards and mask, None for all of them."""
        reads = self.reads(options) if callable(self.reads) else self.reads
        return None if reads is None else tuple(reads)

    def check(self, options: Options) -> None:
        """Errors: ConfigError for an option that is unknown (with the nearest one), missing, or out of range."""
        what, before = f"advantage estimator {self.name!r}", 3 if self.kl == "split" else 2
        check_options(what, self.function, options, after=before)
        for parameter in list(inspect.signature(self.function).parameters.values())[before:]:
            named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            if named and parameter.default is parameter.empty and parameter.name not in options:
                raise ConfigError(f"{what} needs the option {parameter.name!r}, which has no default.")
        if self.built_in:
            check_values(what, options)


@takes_options_of(gae)
def _gae(rewards: Ragged, batch: Batch, *, whiten: bool = True, **options: Any):
    mask = mask_column(batch)
    advantages, returns = gae(rewards, _finite(batch, "values", mask), mask, **options)
    return whitening.whiten(advantages, mask) if whiten else advantages, returns


@takes_options_of(safe_rlhf, without=("multiplier",))
def _safe_rlhf(rewards: Ragged, batch: Batch, kl_rewards: Ragged, *, lagrange: float | LagrangeState, **options: Any):
    mask = mask_column(batch)
    costs = token_rewards(batch.peek("costs"), mask, "costs")
    values, cost_values = _finite(batch, "values", mask), _finite(batch, "cost_values", mask)
    counted = row_scores(costs, mask)[valid_lengths(mask) > 0]
    multiplier = lagrange.update(counted.mean().item()) if isinstance(lagrange, LagrangeState) else float(lagrange)
    half = kl_rewards.values / 2  # the penalty is shared: A would otherwise count it 1 / (1 + lambda) times
    columns = safe_rlhf(
        rewards.with_values(rewards.values + half),
        costs.with_values(costs.values - half),
        values,
        cost_values,
        mask,
        multiplier=multiplier,
        **options,
    )
    return {**columns, "lagrange": torch.full((len(batch),), multiplier)}


@takes_options_of(remax)
def _remax(rewards: Ragged, batch: Batch, **options: Any):
    mask, baseline = mask_column(batch), row_column(batch, "baseline")
    check_finite("baseline", baseline, valid_lengths(mask) > 0)
    return remax(rewards, baseline, mask, **options)


@takes_options_of(reinforce)
def _reinforce(rewards: Ragged, batch: Batch, **options: Any):
    return reinforce(rewards, mask_column(batch), **options)


@takes_options_of(reinforce_plus_plus)
def _reinforce_plus_plus(rewards: Ragged, batch: Batch, **options: Any):
    return reinforce_plus_plus(rewards, mask_column(batch), **options)


def _reinforce_plus_plus_baseline(rewards: Ragged, batch: Batch):
    mask = mask_column(batch)
    scores = row_scores(rewards, mask)
    return reinforce_plus_plus_baseline(scores, _groups(batch), mask), every_token(scores, mask)


@takes_options_of(gdpo)
def _gdpo(rewards: Ragged, batch: Batch, *, components: Sequence[str], **options: Any):
    mask = mask_column(batch)
    scores = [_component(batch, f"rewards/{name}", mask) for name in components]
    return gdpo(scores, _groups(batch), mask, **options), every_token(row_scores(rewards, mask), mask)


def _component(batch: Batch, name: str, mask: Ragged) -> Tensor:
    """[B] float64: a component's score of each row, nan where it does not apply to the row."""
    scores = row_scores(batch.peek(name), mask, name)
    check_finite(name, scores, valid_lengths(mask) > 0, nan=True)
    return scores


def _finite(batch: Batch, name: str, mask: Ragged) -> Ragged:
    """A column of one value per response token. Errors: BatchError, with the row, for one that is not finite."""
    column = token_column(batch, name, mask)
    check_finite(name, column, mask.values)
    return column


def _opo(rewards: Ragged, batch: Batch):
    mask = mask_column(batch)
    scores = row_scores(rewards, mask)
    return every_token(opo(scores, _groups(batch), valid_lengths(mask)), mask), every_token(scores, mask)


def _per_response(function: Callable[..., Tensor]) -> EstimatorFunction:
    """The estimator that gives every token of a response the same: `function(scores, groups, **options) -> [B]`."""

    @functools.wraps(function)  # so that its options are known by its signature
    def estimator(rewards: Ragged, batch: Batch, **options: Any):
        mask = mask_column(batch)
        scores = row_scores(rewards, mask)
        return every_token(function(scores, _groups(batch), **options), mask), every_token(scores, mask)

    return estimator


def _groups(batch: Batch) -> Groups:
    """The groups of the batch, of which rows without a valid token do not count.

    Errors: BatchError when no group has two rows.
    """
    groups = Groups.of(row_column(batch, "group_id"))
    if int(groups.sizes.max()) < 2:
        raise BatchError(
            f"{len(batch)} rows fall into {len(groups.sizes)} groups of one response, which have no other response to "
            f"be compared with. Generate n >= 2 responses per prompt."
        )
    return groups.only(valid_lengths(mask_column(batch)) > 0)


def _gdpo_reads(options: Options) -> tuple[str, ...]:
    return ("group_id", *(f"rewards/{name}" for name in options["components"]))


_GROUP = ("group_id",)
_COST_COLUMNS = ("cost_advantages", "cost_returns", "lagrange")
ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        e.name: e
        for e in (
            Estimator(name="gae", function=_gae, reads=("values",)),
            Estimator(name="grpo", function=_per_response(grpo), reads=_GROUP),
            Estimator(name="dr_grpo", function=_per_response(dr_grpo), reads=_GROUP),
            Estimator(name="rloo", function=_per_response(rloo), reads=_GROUP),
            Estimator(name="opo", function=_opo, reads=_GROUP),
            Estimator(name="gpg", function=_per_response(gpg), reads=_GROUP),
            Estimator(name="grpo_passk", function=_per_response(grpo_passk), reads=_GROUP),
            Estimator(name="gdpo", function=_gdpo, reads=_gdpo_reads, kl="unused"),
            Estimator(name="remax", function=_remax, reads=("baseline",)),
            Estimator(name="reinforce", function=_reinforce),
            Estimator(name="reinforce_plus_plus", function=_reinforce_plus_plus),
            Estimator(name="reinforce_plus_plus_baseline", function=_reinforce_plus_plus_baseline, reads=_GROUP),
            Estimator(
                name="safe_rlhf",
                function=_safe_rlhf,
                reads=("values", "costs", "cost_values"),
                writes=_COST_COLUMNS,
                kl="split",
            ),
        )
    }
)
