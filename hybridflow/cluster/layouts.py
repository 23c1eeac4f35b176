"""A group whose calls have different layouts (ReaL, section 4): one group to the driver, several to the hosts.

    home        trains, and does whatever is not done elsewhere
    followers   ranks in other layouts or on other devices, with weights of their own, each for some calls
                call -> weights stale? -> home --weights--> follower -> the call

Nothing waits: weights are on their way in the order of the calls, and a follower that is up to date gets none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hybridflow.cluster.future import Future
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.placed import Placed
from hybridflow.cluster.reallocation import weights_layout
from hybridflow.cluster.store import Failure
from hybridflow.cluster.weight_link import WEIGHTS
from hybridflow.engine3d.layout import Layout
from hybridflow.protocols import ONE_TO_ALL, Operation, kind_of

Schedule = Mapping[str, Sequence[int | None]]
"""By operation, for each of its calls in an iteration: the number of a follower, or None for home. Further calls begin
again at the first."""


class Follower(WorkerGroup):
    """Ranks that run some calls of another group, under its name, with weights that it gives them."""

    listed: ClassVar[bool] = False

    def __init__(self, placed: Placed) -> None:
        self._version = 0  # of the weights; both sides start with those of the checkpoint
        super().__init__(placed)

    def follow(self, home: Placed, version: int) -> None:
        """Have the weights of `home` from here on; returns at once. What fails is met by the calls that follow."""
        links = self.session.links
        if self._version == version and not links.failed(home, self.placed):
            return

        def layouts() -> tuple[Layout, Layout]:
            return weights_layout(home), weights_layout(self.placed)

        links.send(home, self.placed, WEIGHTS, layouts, due=True)
        self._version = version


class LayoutsGroup(WorkerGroup):
    """`home` and `followers` as one group; `schedule` says which calls are a follower's.

    Calls that train are at home always. Whatever goes to every rank (`ONE_TO_ALL`) goes to those of followers too, and
    their answers come after those of home. Errors: WorkerError when a rank cannot be built, and then nothing is left.
    """

    def __init__(self, home: Placed, followers: Sequence[Placed], schedule: Schedule) -> None:
        self._followers: list[Follower] = []
        self._schedule, self._version = dict(schedule), 0
        self._calls: Counter[str] = Counter()  # of each operation in this iteration
        self._iteration = home.session.iterations.current
        super().__init__(home)
        try:
            for placed in followers:
                self._followers.append(Follower(placed))
        except BaseException:
            self._drop(wait=1.0)
            raise

    @property
    def parts(self) -> tuple[Placed, ...]:
        return (self.placed, *(follower.placed for follower in self._followers))

    def __repr__(self) -> str:
        others = []
        for name, numbers in self._schedule.items():
            grids = [self._followers[n].grid for n in dict.fromkeys(numbers) if n is not None]
            others += [f"{name} at ({grid.p},{grid.t},{grid.d})" for grid in grids]
        return f"{super().__repr__()[:-1]}, {', '.join(others)}>"

    def elsewhere(self, name: str) -> bool:
        return any(number is not None for number in self._schedule.get(name, ()))

    def weights_changed(self) -> None:
        self._version += 1

    def usually_writes(self, name: str) -> tuple[str, ...]:
        numbers = [n for n in self._schedule.get(name, ()) if n is not None]
        return self._followers[numbers[0]].usually_writes(name) if numbers else super().usually_writes(name)

    def _invoke(self, operation: Operation, *args: Any, **kwargs: Any) -> Any:
        self.check_open()
        trains = kind_of(operation) == "training"
        if trains:
            self.weights_changed()  # first: an update that fails half-way has changed them too
        elif (follower := self._next(operation.name)) is not None:
            return self._of_follower(follower, operation, *args, **kwargs)
        result = super()._invoke(operation, *args, **kwargs)
        if operation.protocol is not ONE_TO_ALL or trains:
            return result
        others = [follower for follower in self._followers if operation.name in follower.operations]
        return _joined([result, *(self._of_follower(other, operation, *args, **kwargs) for other in others)])

    def _of_follower(self, follower: Follower, operation: Operation, *args: Any, **kwargs: Any) -> Any:
        follower.follow(self.placed, self._version)
        return follower._invoke(follower.operations[operation.name], *args, **kwargs)

    def _next(self, name: str) -> Follower | None:
        """Whose the next call of this operation is."""
        if self._iteration != self.session.iterations.current:
            self._iteration = self.session.iterations.current
            self._calls.clear()
        if not (numbers := self._schedule.get(name)):
            return None
        number = numbers[self._calls[name] % len(numbers)]
        self._calls[name] += 1
        return None if number is None else self._followers[number]

    def _drop(self, wait: float) -> Failure | None:
        failures = [super()._drop(wait), *(follower._drop(wait) for follower in self._followers)]
        return next((failure for failure in failures if failure is not None), None)

    def forget_hosts(self) -> None:
        super().forget_hosts()
        for follower in self._followers:
            follower.forget_hosts()


def _joined(results: Sequence[Any]) -> Any:
    """What all ranks answered."""
    futures = [result for result in results if isinstance(result, Future)]
    if futures:
        return Future(tuple(part for future in futures for part in future.parts), "list", futures[0].timeout)
    return [answer for result in results for answer in result]
