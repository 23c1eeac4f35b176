"""A group whose calls have different layouts (ReaL, section 4): one group to the driver, several to the hosts.

    primary    trains, and does whatever no replica does
    replicas   ranks in other layouts or on other devices, with weights of their own, each for some calls
               call -> weights stale? -> primary --weights--> replica -> the call

Nothing waits: weights are on their way in the order of the calls, and a replica that is up to date gets none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.cluster.backend import RankGroup
from hybridflow.cluster.failure import Failure
from hybridflow.cluster.future import Future
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.reallocation import weights_layout
from hybridflow.cluster.session import Session
from hybridflow.cluster.weight_transfer import WEIGHTS
from hybridflow.engine3d.layout import Layout
from hybridflow.protocols import ONE_TO_ALL, Operation, kind_of

CallSchedule = Mapping[str, Sequence[int | None]]
"""By operation, for each of its calls in an iteration: the number of a replica, or None for the primary. Further calls
begin again at the first."""


class Replica(WorkerGroup):
    """Ranks that run some calls of another group, under its name, with weights that it gives them."""

    def __init__(self, session: Session, ranks: RankGroup) -> None:
        self._version = 0  # of the weights; both sides start with those of the checkpoint
        super().__init__(session, ranks, listed=False)

    def follow(self, primary: RankGroup, version: int) -> None:
        """Have the weights of `primary` from here on; returns at once. The calls that follow observe what fails."""
        channels = self.session.backend.channels
        if self._version == version and not channels.failed(primary, self.ranks):
            return

        def layouts() -> tuple[Layout, Layout]:
            return tuple(weights_layout(self.session, ranks) for ranks in (primary, self.ranks))  # type: ignore[return-value]

        channels.send(primary, self.ranks, WEIGHTS, layouts, required=True)
        self._version = version


class LayoutsGroup(WorkerGroup):
    """`primary` and `replicas` as one group; `schedule` says which calls are a replica's.

    Calls that train are the primary's always. Whatever goes to every rank (`ONE_TO_ALL`) goes to those of replicas too,
    and their answers come after those of the primary. Errors: WorkerError when a rank cannot be built, and then nothing
    is left.
    """

    def __init__(
        self, session: Session, primary: RankGroup, replicas: Sequence[RankGroup], schedule: CallSchedule
    ) -> None:
        self._replicas: list[Replica] = []
        self._schedule, self._version = dict(schedule), 0
        self._calls_made: Counter[str] = Counter()  # of each operation in this iteration
        self._iteration = session.iterations.current
        super().__init__(session, primary)
        try:
            for ranks in replicas:
                self._replicas.append(Replica(session, ranks))
        except BaseException:
            self._drop(wait=1.0)
            raise

    @property
    def all_ranks(self) -> tuple[RankGroup, ...]:
        return (self.ranks, *(replica.ranks for replica in self._replicas))

    def __repr__(self) -> str:
        others = []
        for name, numbers in self._schedule.items():
            grids = [self._replicas[n].grid for n in dict.fromkeys(numbers) if n is not None]
            others += [f"{name} at ({grid.p},{grid.t},{grid.d})" for grid in grids]
        return f"{super().__repr__()[:-1]}, {', '.join(others)}>"

    def has_replica_for(self, name: str) -> bool:
        return any(number is not None for number in self._schedule.get(name, ()))

    def weights_changed(self) -> None:
        self._version += 1

    def usually_writes(self, name: str) -> tuple[str, ...]:
        numbers = [n for n in self._schedule.get(name, ()) if n is not None]
        return self._replicas[numbers[0]].usually_writes(name) if numbers else super().usually_writes(name)

    def _invoke(self, operation: Operation, *args: Any, **kwargs: Any) -> Any:
        self.check_open()
        trains = kind_of(operation) == "training"
        if trains:
            self.weights_changed()  # first: an update that fails half-way has changed them too
        elif (replica := self._next(operation.name)) is not None:
            return self._on_replica(replica, operation, *args, **kwargs)
        result = super()._invoke(operation, *args, **kwargs)
        if operation.protocol is not ONE_TO_ALL or trains:
            return result
        others = [replica for replica in self._replicas if operation.name in replica.operations]
        return _joined([result, *(self._on_replica(other, operation, *args, **kwargs) for other in others)])

    def _on_replica(self, replica: Replica, operation: Operation, *args: Any, **kwargs: Any) -> Any:
        replica.follow(self.ranks, self._version)
        return replica._invoke(replica.operations[operation.name], *args, **kwargs)

    def _next(self, name: str) -> Replica | None:
        """Whose the next call of this operation is."""
        if self._iteration != self.session.iterations.current:
            self._iteration = self.session.iterations.current
            self._calls_made.clear()
        if not (numbers := self._schedule.get(name)):
            return None
        number = numbers[self._calls_made[name] % len(numbers)]
        self._calls_made[name] += 1
        return None if number is None else self._replicas[number]

    def _drop(self, wait: float) -> Failure | None:
        failures = [super()._drop(wait), *(replica._drop(wait) for replica in self._replicas)]
        return next((failure for failure in failures if failure is not None), None)

    def forget_hosts(self) -> None:
        super().forget_hosts()
        for replica in self._replicas:
            replica.forget_hosts()


def _joined(results: Sequence[Any]) -> Any:
    """What all ranks answered."""
    futures = [result for result in results if isinstance(result, Future)]
    if futures:
        return Future.concat(futures, "list")
    return [answer for result in results for answer in result]
