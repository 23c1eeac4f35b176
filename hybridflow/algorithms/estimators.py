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
from hybridflow.algorithms.credit import every_token, token_rewards
from hybridflow.algorithms.estimator_options import check_values
from hybridflow.algorithms.gae import gae, valid_lengths
from hybridflow.algorithms.gdpo import gdpo
from hybridflow.algorithms.gpg import gpg
from hybridflow.algorithms.group import Groups
from hybridflow.algorithms.grpo import dr_grpo, grpo
from hybridflow.algorithms.grpo_passk import grpo_passk
from hybridflow.algorithms.lagrange import LagrangeState
from hybridflow.algorithms.opo import opo
from hybridflow.algorithms.options import check_options
from hybridflow.algorithms.reinforce import reinforce
from hybridflow.algorithms.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from hybridflow.algorithms.remax import remax
from hybridflow.algorithms.rloo import rloo
from hybridflow.algorithms.safe_rlhf import safe_rlhf
from hybridflow.algorithms.typed_columns import row_column, token_column
from hybridflow.batch import Batch
from hybridflow.errors import BatchError, ConfigError
from hybridflow.ragged import Ragged

EstimatorFunction = Callable[..., tuple[Ragged, Ragged] | Mapping[str, Ragged | Tensor]]
"""`estimator(token_rewards, batch, **options) -> (advantages, returns)`, ragged [B, R] like the response, or a mapping
of columns with these two."""

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


def _gae(rewards: Ragged, batch: Batch, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True):
    mask = token_column(batch, "response_mask")
    advantages, returns = gae(rewards, token_column(batch, "values", mask), mask, gamma=gamma, lam=lam)
    return whitening.whiten(advantages, mask) if whiten else advantages, returns


def _safe_rlhf(
    rewards: Ragged,
    batch: Batch,
    kl_rewards: Ragged,
    *,
    lagrange: float | LagrangeState,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = False,
):
    mask = token_column(batch, "response_mask")
    costs = token_rewards(batch.peek("costs"), mask, "costs")
    counted = _scores(costs)[valid_lengths(mask) > 0]
    multiplier = lagrange.update(counted.mean().item()) if isinstance(lagrange, LagrangeState) else float(lagrange)
    half = kl_rewards.values / 2  # the penalty is shared: A would otherwise count it 1 / (1 + lambda) times
    columns = safe_rlhf(
        rewards.with_values(rewards.values + half),
        costs.with_values(costs.values - half),
        token_column(batch, "values", mask),
        token_column(batch, "cost_values", mask),
        mask,
        multiplier=multiplier,
        gamma=gamma,
        lam=lam,
        whiten=whiten,
    )
    return {**columns, "lagrange": torch.full((len(batch),), multiplier)}


def _remax(rewards: Ragged, batch: Batch, *, gamma: float = 1.0):
    return remax(rewards, row_column(batch, "baseline"), token_column(batch, "response_mask"), gamma=gamma)


def _reinforce(rewards: Ragged, batch: Batch, *, gamma: float = 1.0, normalize: bool = False):
    return reinforce(rewards, token_column(batch, "response_mask"), gamma=gamma, normalize=normalize)


def _reinforce_plus_plus(rewards: Ragged, batch: Batch, *, gamma: float = 1.0):
    return reinforce_plus_plus(rewards, token_column(batch, "response_mask"), gamma=gamma)


def _reinforce_plus_plus_baseline(rewards: Ragged, batch: Batch):
    mask, scores = token_column(batch, "response_mask"), _scores(rewards)
    return reinforce_plus_plus_baseline(scores, _groups(batch), mask), every_token(scores, mask)


def _gdpo(
    rewards: Ragged,
    batch: Batch,
    *,
    components: Sequence[str],
    weights: Sequence[float] | None = None,
    eps: float = 1e-6,
):
    mask = token_column(batch, "response_mask")
    scores = [_component(batch, name, mask) for name in components]
    weights = [1.0] * len(scores) if weights is None else weights
    return gdpo(scores, _groups(batch), mask, weights=weights, eps=eps), every_token(_scores(rewards), mask)


def _component(batch: Batch, name: str, mask: Ragged) -> Tensor:
    """[B] float64: a component's score of each row, token rewards summed over valid tokens."""
    name = f"rewards/{name}"
    if not isinstance(batch.peek(name), Ragged):
        return row_column(batch, name).to(torch.float64)
    tokens = token_column(batch, name, mask)
    return _scores(tokens.with_values(torch.where(mask.values, tokens.values, 0.0)))


def _opo(rewards: Ragged, batch: Batch):
    mask, scores = token_column(batch, "response_mask"), _scores(rewards)
    return every_token(opo(scores, _groups(batch), valid_lengths(mask)), mask), every_token(scores, mask)


def _per_response(function: Callable[..., Tensor]) -> EstimatorFunction:
    """The estimator that gives every token of a response the same: `function(scores, groups, **options) -> [B]`."""

    @functools.wraps(function)  # so that its options are known by its signature
    def estimator(rewards: Ragged, batch: Batch, **options: Any):
        mask, scores = token_column(batch, "response_mask"), _scores(rewards)
        return every_token(function(scores, _groups(batch), **options), mask), every_token(scores, mask)

    return estimator


def _scores(rewards: Ragged) -> Tensor:
    """[B] float64: the sum of each row; masked tokens have no reward."""
    return rewards.to(torch.float64).row_sum()


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
    return groups.only(valid_lengths(token_column(batch, "response_mask")) > 0)


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
