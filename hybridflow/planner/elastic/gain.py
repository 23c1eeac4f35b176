"""The policy `gain`: the move with which the iteration is predicted to end first, if it pays. Pure."""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence

from hybridflow.planner.elastic.forecast import First, Forecast, SeenLengths
from hybridflow.planner.elastic.policies import lend, moves, rlinf, static
from hybridflow.planner.elastic.state import Action, DeviceSplit, Finalize, Policy, State
from hybridflow.settings import NonNegative, settings

SHARES = (1, 7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4, 3 / 16, 1 / 8, 1 / 16, 1 / 32)
"""Of the most rollout instances that there can be: those of the splits that are considered."""
ALIVE = (0.75, 0.5, 0.35, 0.25, 0.15, 0.08, 0.04, 0.02, 0.0)
"""Of the rows: when lent devices may return."""

AGAIN = 12
TRIED = 16  # first moves, and ways to stay, for which further moves are considered


@settings
class Gain:
    """Our policy. `margin`: the share of the forecast seconds that a move must save, and that waiting must save where
    lent devices have a mini-batch to train. `history`: whether earlier
    iterations decide, too. Without any lengths seen it keeps the static placement."""

    margin: NonNegative = 0.005
    history: bool = True

    def __call__(self, state: State) -> list[Action]:
        if state.done == state.minibatches:
            return [Finalize()]
        if state.training or not len(state.lengths) or (self.history and not pays(state)):
            return []
        splits = considered(state)
        return self.choose(state, self.firsts(state, splits), Forecast(state, splits, SeenLengths(state.lengths)))

    def firsts(self, state: State, splits: Sequence[DeviceSplit]) -> list[First]:
        """First moves: to each split now; to each from lent devices later."""
        rows, lent = state.running_rows, min(splits, key=lambda split: split.actor)
        firsts = [First(split) for split in splits if split.actor and (split.rollout or not rows)]
        if rows and not lent.actor and (not state.actor.instances or state.event == "start"):
            alive = {int(state.rows * share) for share in ALIVE}
            firsts += [
                First(split, a) for split in splits if split.actor and split.rollout for a in sorted(alive) if a < rows
            ]
        return firsts

    def choose(self, state: State, firsts: Sequence[First], forecast: Forecast) -> list[Action]:
        """The first move of the best plan, unless staying is as good."""
        now = DeviceSplit(state.rollout.instances, state.actor.instances)
        rough = forecast.seconds(firsts, further=False)
        order = sorted(range(len(firsts)), key=lambda i: float(rough[i]))
        going, staying = [], []
        for first in (firsts[i] for i in order):
            stays = first == First(now) if now.actor else first.alive is not None
            (staying if stays else going).append(first)
        tried = [*going[:TRIED], *staying[:TRIED]]
        seconds = [float(value) for value in forecast.seconds(tried, further=True)]
        if not going:  # the devices allow no other split
            return []
        best = min(range(len(going[:TRIED])), key=lambda i: seconds[i])
        stay = min(seconds[len(going[:TRIED]) :], default=math.inf)
        late = not now.actor and state.ready >= state.minibatch_groups
        margin = self.margin * (state.seconds + seconds[best]) * (-1 if late else 1)
        if stay <= seconds[best] + margin:
            return []
        first = tried[best]
        return balanced(state, first.split if first.alive is None else min(forecast.splits, key=lambda s: s.actor))


gain = Gain  # as `rlinf()`
POLICIES: dict[str, Policy] = {"gain": gain(), "rlinf": rlinf(), "lend": lend, "static": static}


def pays(state: State) -> bool:
    """Whether iterations in which devices moved were no slower than others, as measured: what a forecast does not know,
    such as processes that share cores, shows there. Both kinds are tried first; then one in `AGAIN` iterations tries
    what was slower."""
    if not state.iterations:
        return True
    still, moved = ([each for found, each in state.iterations if found == kind][-4:] for kind in (False, True))
    if len(still) < 3:  # the first one is slow
        return False
    slower = len(moved) >= 2 and statistics.median(moved) > statistics.median(still)
    return not slower or not any(found for found, _ in state.iterations[-AGAIN:])


def considered(state: State) -> list[DeviceSplit]:
    """Splits among which devices may move: the present one, the static one, and for some numbers of rollout instances
    the largest actor beside them."""
    rollout, actor = state.rollout, state.actor
    own = state.inference.instances * state.inference.devices
    found = {DeviceSplit(rollout.instances, actor.instances), DeviceSplit(rollout.initial, actor.initial)}
    counts = {max(1, round(rollout.most * share)) for share in SHARES}
    for count in counts | {0, 1, rollout.initial, rollout.instances}:
        room = (rollout.most - count) * rollout.devices if count else state.devices - own
        size = max((size for size in actor.sizes if size * actor.devices <= room), default=0)
        if size or count == rollout.most:
            found.add(DeviceSplit(count, size))
    return sorted(found)


def balanced(state: State, to: DeviceSplit) -> list[Action]:
    """The actions that lead to the split. Groups leave instances, or fill new ones, so that all have as many rows: each
    to the instance with the fewest, cheap ones first."""
    ids = range(state.rollout.most - to.rollout, state.rollout.most)
    if state.event == "start" or to.rollout == state.rollout.instances:
        return moves(state, to, {})
    rows = {i: sum(len(group.tokens) for group in state.running.get(i, ())) for i in ids}
    leaving = [group for i, groups in state.running.items() if i not in rows for group in groups]
    mean = state.running_rows / max(1, len(ids))
    for i in ids if any(i not in state.running for i in ids) else ():
        for group in sorted(state.running.get(i, ()), key=lambda group: group.migration_tokens):
            if rows[i] - len(group.tokens) < mean:
                break
            rows[i] -= len(group.tokens)
            leaving.append(group)
    heap = [(count, i) for i, count in rows.items()]
    heapq.heapify(heap)
    target: dict[int, int] = {}
    for group in sorted(leaving, key=lambda group: (-len(group.tokens), group.migration_tokens)):
        count, i = heapq.heappop(heap)
        target[group.group] = i
        heapq.heappush(heap, (count + len(group.tokens), i))
    cheap = sorted(leaving, key=lambda group: group.migration_tokens)
    return moves(state, to, {group.group: target[group.group] for group in cheap})
