"""ActingSession: trajectories that live across the calls of a replica, as a session of rows does. Between two calls
their agents wait in their processes, and turns under way in the engine.

start -> advance: engine.serve(turns) until enough have ended, or weights are to arrive -> those that have ended
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hybridflow.batch.batch import Batch
from hybridflow.config import Until
from hybridflow.engines.contract import GenerateEngine, Row
from hybridflow.environments.agent import Acted, Agent, AgentTurns, report_failures
from hybridflow.environments.sessions import Sessions
from hybridflow.errors import ConfigError, HybridFlowError


class ActingSession:
    """Of one rank of a generation replica; the agents run beside the first one. `under_way` is an upper bound of the
    trajectories that have not ended, equal on all ranks."""

    def __init__(self, engine: GenerateEngine, checkpoint: str, numbers: Iterator[int]) -> None:
        self._engine, self._checkpoint, self._numbers = engine, checkpoint, numbers
        self.under_way = 0
        self._kept: set[str] = set()  # turns under way
        self._agent: Agent | None = None
        self._sessions: tuple[bytes, Sessions] | None = None  # on the first rank, as `_turns`
        self._turns: AgentTurns | None = None
        self._failed: HybridFlowError | None = None  # of turns during a weight transfer

    def check(self, agent: Agent | None) -> None:
        """Errors: ConfigError for a call that mixes trajectories with others or with rows; what failed meanwhile."""
        if (failed := self._failed) is not None:
            self._failed = None
            raise failed
        if agent is not None and any(row.row_id >= 0 for row in self._engine.unfinished):
            raise ConfigError(
                "this session has unfinished rows, and trajectories have one of their own: withdraw_rows()."
            )
        if self.under_way and (agent is None or self._agent is None or agent.described != self._agent.described):
            raise ConfigError(
                "this session has trajectories under way: give the same tools=, environment= or solve= with the same "
                "settings until they have ended, or withdraw_rows() first."
            )

    def start(self, agent: Agent, begun: Sequence[Row], batch: Batch, n: int) -> None:
        """Begin `n` trajectories per row of `batch`."""
        if not self.under_way:
            if self._engine.is_first:
                self._take_up(agent)
            self._agent = agent
        self.under_way += len(begun)
        if not self._engine.is_first:
            return
        assert self._turns is not None
        self._turns.start(begun, [row for row in batch.to_dicts() for _ in range(n)])

    def _take_up(self, agent: Agent) -> None:
        """The processes of the last agent, where this one runs the same."""
        made, sessions = agent.sessions(self._checkpoint)
        if self._sessions is None or self._sessions[0] != made:
            self.close()
            self._sessions = made, sessions
        if self._turns is None or self._agent is None or agent.described != self._agent.described:
            self._turns = AgentTurns(self._sessions[1], agent.on_failure, self._numbers)

    def advance(self, until: Until) -> list[Acted] | None:
        """Go on until `until`; the trajectories that have ended, in the order in which they began. None on other ranks.

        Errors: RewardError for one that failed, where the agent says so, on the first rank.
        """
        start, turns = time.monotonic(), self._turns

        def reached() -> bool:
            assert turns is not None
            return (
                (until.rows is not None and len(turns.ended) >= until.rows)
                or (until.groups is not None and turns.groups() >= until.groups)
                or (until.seconds is not None and time.monotonic() - start >= until.seconds)
            )

        if self.under_way:
            self._serve(reached)
        if not self._engine.is_first:
            return None
        acted = [] if turns is None else [one for _, one in sorted(turns.take().items())]
        report_failures(acted, raises=self._agent is not None and self._agent.on_failure == "raise")
        return acted

    def advance_while(self, going: Callable[[], bool]) -> None:
        """Go on as long as `going()` on the first rank. What the agents raise is raised by the next call."""
        try:
            self._serve(lambda: not going())
        except HybridFlowError as error:
            self._failed = error

    def _serve(self, reached: Callable[[], bool]) -> None:
        try:
            if self._turns is not None:
                self._turns.reached = reached
            self.under_way = self._engine.serve(self._turns, self._kept)
        except BaseException:
            self.close()
            raise

    def withdraw(self, row_ids: Sequence[int] | None, keep: bool) -> list[dict[str, Any]]:
        """See `AgentTurns.withdraw`; on the first rank."""
        found = [] if self._turns is None else self._turns.withdraw(row_ids, keep)
        if row_ids is None and not keep:
            self._engine.withdraw(self._kept)
            self._kept.clear()
            self.under_way = 0
        return found

    def close(self) -> None:
        """End all trajectories and their processes. May be called twice."""
        self.under_way, self._turns = 0, None
        if self._sessions is not None:
            self._sessions[1].close()
            self._sessions = None
