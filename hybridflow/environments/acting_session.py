"""ActingSession: trajectories that live across the calls of a replica, as a session of rows does. Between two calls
their agents wait in their processes, and turns under way in the engine.

start -> advance: engine.serve(turns) until enough have ended, or weights are to arrive -> those that have ended
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridflow.batch.batch import Batch
from hybridflow.config import Until
from hybridflow.engines.contract import Row
from hybridflow.environments.agent import Acted, Agent, AgentTurns, report_failures
from hybridflow.environments.sessions import Sessions
from hybridflow.errors import ConfigError
from hybridflow.rewards.process_pool import pickled

if TYPE_CHECKING:
    from hybridflow.engines.vllm.engine import VLLMEngine


class RecentSessions:
    """The processes of the `most` agents that were asked for last."""

    def __init__(self, checkpoint: str, most: int) -> None:
        self._checkpoint, self._most = checkpoint, most
        self._made: dict[bytes, Sessions] = {}  # by what they run, the last one used last

    def of(self, agent: Agent) -> Sessions:
        """Those of a recent call, where they run the same."""
        make = agent.sessions(self._checkpoint)
        name = pickled(make, "the agent")
        self._made[name] = found = self._made.pop(name, None) or make()
        while len(self._made) > self._most:
            self._made.pop(next(iter(self._made))).close()
        return found

    def close(self) -> None:
        """May be called twice; `of` begins anew."""
        while self._made:
            self._made.popitem()[1].close()


class ActingSession:
    """Of one rank of a generation replica; the agents run beside the first one. `under_way` is an upper bound of the
    trajectories that have not ended. `_untaken`: trajectories may have ended during a weight transfer and wait for
    `advance`. Both are equal on all ranks."""

    def __init__(self, engine: VLLMEngine, checkpoint: str, numbers: Iterator[int]) -> None:
        self._engine, self._numbers = engine, numbers
        self.under_way, self._untaken = 0, False
        self._kept: set[str] = set()  # turns under way
        self._agent: Agent | None = None
        self._sessions = RecentSessions(checkpoint, 1)
        self._turns: AgentTurns | None = None  # those of the first rank do something
        self._failed: Exception | None = None  # of turns during a weight transfer

    def check(self, agent: Agent | None) -> None:
        """Errors: ConfigError for a call that mixes trajectories with others or with rows; what failed meanwhile."""
        if (failed := self._failed) is not None:
            self._failed = None
            raise failed
        if agent is not None and any(row.row_id >= 0 for row in self._engine.unfinished):
            raise ConfigError(
                "this session has unfinished rows, and trajectories have one of their own: withdraw_rows()."
            )
        same = agent is not None and self._agent is not None and agent.described == self._agent.described
        if (self.under_way or self._untaken) and not same:
            raise ConfigError(
                "this session has trajectories under way: give the same tools=, environment= or solve= with the same "
                "settings until they were returned, or withdraw_rows() first."
            )

    def start(self, agent: Agent, begun: Sequence[Row], batch: Batch, n: int) -> None:
        """Begin `n` trajectories per row of `batch`."""
        if not self.under_way:
            same = self._agent is not None and self._agent.described == agent.described
            if self._turns is None or not (same and self._turns.ended):
                self._turns = AgentTurns(partial(self._sessions.of, agent), agent.on_failure, self._numbers)
            self._agent = agent
        self.under_way += len(begun)
        if self._engine.is_first:
            assert self._turns is not None
            self._turns.start(begun, [row for row in batch.to_dicts() for _ in range(n)])

    def advance(self, until: Until) -> list[Acted] | None:
        """Go on until `until`; the trajectories that have ended, in the order in which they began. None on other ranks.

        Errors: RewardError for one that failed, where the agent says so, on the first rank.
        """
        start, turns, self._untaken = 0.0, self._turns, False

        def reached() -> bool:
            nonlocal start
            assert turns is not None
            start = start or time.monotonic()  # the first poll is in time
            return (
                (until.rows is not None and len(turns.ended) >= until.rows)
                or (until.groups is not None and turns.groups() >= until.groups)
                or (until.seconds is not None and time.monotonic() - start >= until.seconds)
            )

        if self.under_way:
            self._serve(reached)
        if not self._engine.is_first:
            return None
        acted = [] if turns is None else turns.take()
        if self._agent is not None:
            report_failures(acted, self._agent)
        return acted

    def advance_while(self, going: Callable[[], bool]) -> None:
        """Go on as long as `going()` on the first rank. What the agents raise is raised by the next call."""
        self._untaken = self._untaken or self.under_way > 0
        try:
            self._serve(lambda: not going())
        except Exception as error:
            self._failed = error

    def _serve(self, reached: Callable[[], bool]) -> None:
        try:
            if self._turns is not None:
                self._turns.reached = reached
            self.under_way = self._engine.serve(self._turns if self._engine.is_first else None, self._kept)
        except BaseException:
            self.close()
            raise

    def withdraw(self, row_ids: Sequence[int] | None, keep: bool) -> list[dict[str, Any]]:
        """See `AgentTurns.withdraw`; on the first rank."""
        found = [] if self._turns is None else self._turns.withdraw(row_ids, keep)
        if row_ids is None and not keep:
            self._engine.abandon(self._kept)
            self.under_way, self._untaken = 0, False
            if self._turns is not None:
                _ = self._turns.take()  # those that ended, too
        return found

    def close(self) -> None:
        """End all trajectories and their processes. May be called twice."""
        self.under_way, self._untaken, self._turns = 0, False, None
        self._sessions.close()
