"""Names of estimators and losses, and the one place where a name or function with options becomes a value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, TypeVar

from hybridflow.algorithms.advantages.estimator import Estimator, UserEstimator
from hybridflow.algorithms.advantages.gae import GAE, SafeRLHF
from hybridflow.algorithms.advantages.grpo import GDPO, GPG, GRPO, OPO, RLOO, DrGRPO, GRPOPassK
from hybridflow.algorithms.advantages.reinforce import Reinforce, ReinforcePlusPlus, ReinforcePlusPlusBaseline, ReMax
from hybridflow.algorithms.losses.distillation import GKD
from hybridflow.algorithms.losses.loss import Loss, UserLoss
from hybridflow.algorithms.losses.policy import PolicyLoss, UserTokenLoss, columns_of
from hybridflow.algorithms.losses.ppo import CISPO, GMPO, GSPO, PPO, SAPO, ReinforceLoss
from hybridflow.algorithms.losses.preference import DPO, BradleyTerry
from hybridflow.algorithms.losses.pretrain import PretrainLoss, SFTLoss
from hybridflow.algorithms.losses.value import ValueLoss
from hybridflow.errors import ConfigError, nearest

ESTIMATORS: Mapping[str, type[Estimator]] = MappingProxyType(
    {
        "gae": GAE,
        "grpo": GRPO,
        "dr_grpo": DrGRPO,
        "rloo": RLOO,
        "opo": OPO,
        "gpg": GPG,
        "grpo_passk": GRPOPassK,
        "gdpo": GDPO,
        "remax": ReMax,
        "reinforce": Reinforce,
        "reinforce_plus_plus": ReinforcePlusPlus,
        "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
        "safe_rlhf": SafeRLHF,
    }
)
POLICY_LOSSES: Mapping[str, type[Loss]] = MappingProxyType(
    {
        "ppo": PPO,
        "gspo": GSPO,
        "cispo": CISPO,
        "geo_mean": GMPO,
        "sapo": SAPO,
        "reinforce": ReinforceLoss,
        "pretrain": PretrainLoss,
        "gkd": GKD,
        "sft": SFTLoss,
        "dpo": DPO,
    }
)
VALUE_LOSSES: Mapping[str, type[Loss]] = MappingProxyType({"value": ValueLoss, "bradley_terry": BradleyTerry})
T = TypeVar("T")


def find_estimator(estimator: str | Estimator | Callable[..., Any], options: Mapping[str, Any]) -> Estimator:
    """An advantage estimator as it is, by its name with options, or a user's function with options. Errors: ConfigError
    for an unknown name or option, with the nearest known one, and an option out of range."""
    if (known := _known("advantage estimator", estimator, options, ESTIMATORS, Estimator)) is not None:
        return known
    check_options("advantage estimator", estimator, options, inputs=2)
    return UserEstimator(estimator, options)  # type: ignore[arg-type]  a function


def policy_loss(loss: str | Loss | Callable[..., Any] = "ppo", **options: Any) -> Loss:
    """The loss of an actor: a value such as `PPO(clip=0.2)`, a name with options, or a user's function.

    Names: "ppo", "gspo", "cispo", "geo_mean", "sapo", "reinforce", "pretrain", "sft", "gkd", "dpo". All but the last
    four have, besides their own options, those of `PolicyLoss`. A user's function has one of two forms:

    `f(log_probs, old_log_probs, advantages, mask, **options)` gives the loss of each token: a tensor [N], ragged
    [B, R], or `TokenLoss`. Its first parameter is called log_probs; parameters without a default name what it reads, so
    it may read less or more (`entropy`, `logits` and `ref_logits` of the engine; any column of the batch). Columns of
    floats with one value per response token come ragged [B, R] and 0 at masked tokens; all others, such as [B] or
    integers, as they are. The loss is aggregated, by "token-mean" or its attribute `aggregation`, and takes the options
    of `PolicyLoss` as well.

    `f(outputs, rows, totals, **options)` gives the micro-batch's share of the whole loss, a scalar or (scalar,
    metrics). It may carry attributes `reads` (default: every column) and `outputs` (default: "log_probs"). Errors:
    ConfigError for an unknown name or option, with the nearest known one, or an option out of range."""
    if (known := _known("policy loss", loss, options, POLICY_LOSSES, Loss)) is not None:
        return known
    function: Any = loss
    if next(iter(inspect.signature(function).parameters), "") != "log_probs":
        check_options("policy loss", function, options, inputs=3)
        return UserLoss(function, options, ("log_probs",))
    every = {field.name for field in fields(PolicyLoss)}  # type: ignore[arg-type]
    shared = {name: value for name, value in options.items() if name in every}
    own = {name: value for name, value in options.items() if name not in shared}
    check_options("policy loss", function, own, inputs=len(columns_of(function)), shared=every)
    return UserTokenLoss(function=function, options=own, **shared)


def value_loss(loss: str | Loss | Callable[..., Any] = "value", **options: Any) -> Loss:
    """The loss of a critic: `ValueLoss(...)`, "value" or "bradley_terry" (of a reward model) with options, or a user's
    `f(outputs, rows, totals, **options)`, whose `outputs` are "values" by default. Errors: those of `policy_loss`."""
    if (known := _known("value loss", loss, options, VALUE_LOSSES, Loss)) is not None:
        return known
    check_options("value loss", loss, options, inputs=3)
    return UserLoss(loss, options, ("values",))  # type: ignore[arg-type]  a function


def _known(what: str, given: Any, options: Mapping[str, Any], named: Mapping[str, type[T]], base: type[T]) -> T | None:
    """The value that `given` is or names; None for a function. Errors: ConfigError."""
    if isinstance(given, base):
        if options:
            name = type(given).__name__
            raise ConfigError(f"{what} {name}(...) has its options in it: write {name}({next(iter(options))}=...).")
        return given
    if isinstance(given, Estimator | Loss):
        name = type(given).__name__
        raise ConfigError(f"{what}: {name}(...) is of another kind.{nearest(name, named)}")
    if isinstance(given, type):
        raise ConfigError(f"{what} {given.__name__} is a class: give a value, {given.__name__}(...).")
    if callable(given):
        return None
    if not isinstance(given, str) or given not in named:
        raise ConfigError(f"{what} {given!r} is unknown.{nearest(str(given), named)}")
    return named[given](**options)


def check_options(
    what: str, function: Any, options: Mapping[str, Any], inputs: int, shared: Iterable[str] = ()
) -> None:
    """Check the options of a user's function, whose first `inputs` parameters are given by us. Errors: ConfigError for
    one that it does not have, with the nearest one, that is missing, or `shared` by all losses."""
    what = f"{what} {getattr(function, '__name__', type(function).__name__)!r}"
    parameters = list(inspect.signature(function).parameters.values())
    own = {p.name: p for p in parameters[inputs:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    if both := sorted(set(shared) & own.keys()):
        raise ConfigError(f"{what} has a parameter {both[0]!r}, which every policy loss has: give it another name.")
    for name in options if not any(p.kind is p.VAR_KEYWORD for p in parameters) else ():
        if name not in own:
            known = [*own, *sorted(shared)]
            raise ConfigError(f"{what} has no option {name!r}.{nearest(name, known) if known else ' It takes none.'}")
    for name, parameter in own.items():
        if parameter.default is parameter.empty and name not in options:
            raise ConfigError(f"{what} needs the option {name!r}, which has no default.")
