"""Runner-ups: for every call of a plan, the next best layout with all others kept, and why it is not taken. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridflow.planner.evaluation import Evaluator, options_of
from hybridflow.planner.graph import Call
from hybridflow.planner.plans import ExecutionPlan
from hybridflow.planner.space import Option, Problem


def runner_ups(problem: Problem, plan: ExecutionPlan, **how) -> dict[str, tuple[str, str]]:
    """By call: the runner-up and why it lost, as texts. Calls without another layout that can run are left out.

    Keywords for the timeline as for `Schedule`.
    """
    evaluator = Evaluator(problem, options_of(problem, also=[plan]), **how)
    state = evaluator.state(plan)
    if state is None:
        return {}
    own, found, static = evaluator.score(state), {}, problem.static(plan)
    assert own is not None
    for i, call in enumerate(evaluator.calls):
        best: tuple[float, float, int] | None = None
        for number, option in enumerate(evaluator.options[i]):
            if number == state[i] or (best and option.seconds > best[0]):  # an iteration takes longer than its calls
                continue
            limit = best[0] * (1 + 1e-9) if best else math.inf
            score = evaluator.score([*state[:i], number, *state[i + 1 :]], limit)
            if score is not None and score.good and (best is None or (score.seconds, option.seconds) < best[:2]):
                best = (score.seconds, option.seconds, number)
        if best is not None:
            taken, other = evaluator.options[i][state[i]], evaluator.options[i][best[2]]
            taken, other = (_with_room(problem, call, option, static) for option in (taken, other))
            found[call.name] = (str(other.plan), _why(problem, call.name, taken, other, best[0] - own.seconds))
    return found


def _with_room(problem: Problem, call: Call, option: Option, static: Sequence[float]) -> Option:
    """Generation with the KV cache that static bytes leave."""
    if call.kind != "generation":
        return option
    beside = max(static[device] for device in option.plan.mesh.devices)
    return option._replace(seconds=problem.generation(call, option.plan, beside))


def _why(problem: Problem, name: str, taken: Option, other: Option, more: float) -> str:
    call = problem.graph.call(name)
    itself = f"the call alone would take {other.seconds:.4g} s instead of {taken.seconds:.4g} s"
    if more <= 1e-9 * max(taken.seconds, 1e-9):
        return f"the iteration would take as long, {itself}"
    text = f"the iteration would take {more:.3g} s more, "
    if other.seconds > taken.seconds * (1 + 1e-9):
        return f"{text}{itself}, mostly {problem.limit(call, other.plan, 0.0)}"
    if other.plan.mesh == taken.plan.mesh:
        return f"{text}for {itself}, but weights or KV cache would not lie as they do now"
    return f"{text}for {itself}, but its devices are those that other calls or weights need"
