"""The dataflow graphs of PPO and GRPO, as the papers' loops have them, for searches without a driver to trace."""

from __future__ import annotations

from collections.abc import Mapping

from hybridflow.models.hf_spec import Decoder
from hybridflow.planner.describe.graph import HELPER, Call, Graph, GraphBuilder, Source

_TEXTS = ("prompt_ids", "response_ids")
_GENERATED = ("prompt_ids", "response_ids", "response_mask", "num_tokens", "log_probs")
_GENERATE = Call("", "actor", "generate_sequences", "generation", ("prompt_ids",), _GENERATED)
_LOG_PROBS = Call("", "actor", "compute_log_prob", "inference", _TEXTS, ("old_log_probs",))
_REFERENCE = Call("", "reference", "compute_ref_log_prob", "inference", _TEXTS, ("ref_log_probs",))
_VALUES = Call("", "critic", "compute_values", "inference", _TEXTS, ("values",))
_REWARDS = Call("", "reward", "compute_reward", "inference", _TEXTS, ("rewards",))


def _advantages(*further: str) -> Call:
    reads = ("rewards", "response_mask", *further)
    return Call("", HELPER, "compute_advantage", "function", reads, ("advantages", "returns"))


def _update(group: str, *further: str, minibatches: int, epochs: int) -> Call:
    reads = (*_TEXTS, "response_mask", *further)
    return Call("", group, f"update_{group}", "training", reads, minibatches=minibatches, epochs=epochs)


def ppo(
    actor: Decoder,
    critic: Decoder,
    reference: Decoder | None = None,
    reward: Decoder | None = None,
    *,
    log_probs: bool = True,
    minibatches: int = 1,
    epochs: int = 1,
) -> Graph:
    """PPO with four groups. `reference` defaults to the actor's model; without `reward` a function gives rewards.

    `log_probs=False`: generation gives them, and there is no pass of the actor for them (ReaL's six calls).
    """
    models = {"actor": actor, "critic": critic, "reference": reference or actor, "reward": reward}
    policy, steps = "old_log_probs" if log_probs else "log_probs", {"minibatches": minibatches, "epochs": epochs}
    return _loop(
        models,
        _GENERATE,
        *([_LOG_PROBS] if log_probs else []),
        _REFERENCE,
        _VALUES,
        _REWARDS,
        _advantages("values", policy, "ref_log_probs"),
        _update("critic", "values", "returns", **steps),
        _update("actor", "advantages", policy, **steps),
    )


def grpo(
    actor: Decoder,
    reference: Decoder | None = None,
    reward: Decoder | None = None,
    *,
    minibatches: int = 1,
    epochs: int = 1,
) -> Graph:
    """GRPO: no critic. `reference` defaults to the actor's model; without `reward` a function gives rewards."""
    models = {"actor": actor, "reference": reference or actor, "reward": reward}
    update = _update("actor", "advantages", "old_log_probs", "ref_log_probs", minibatches=minibatches, epochs=epochs)
    return _loop(models, _GENERATE, _LOG_PROBS, _REFERENCE, _REWARDS, _advantages(), update)


def _loop(models: Mapping[str, Decoder | None], *calls: Call) -> Graph:
    """The graph of these calls in every iteration, each of which reads what was last written."""
    builder = GraphBuilder(dict(models))
    for _ in range(2):
        builder.begin()
        writers: dict[str, tuple[Source, ...]] = {}
        for call in calls:
            reads = {column: writers.get(column, ()) for column in call.reads}
            sizes = {"minibatches": call.minibatches, "epochs": call.epochs}
            source = builder.call(call.group, call.method, call.kind, reads, call.writes, **sizes)
            writers |= dict.fromkeys(call.writes, (source,))
    return builder.graph()
