"""ReplicaStream: a stream of one rollout whose replicas can stop and start; unfinished rows continue on others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hybridflow.streams.replica_calls import ReplicaCalls
from hybridflow.streams.stream import ResponseStream


class ReplicaStream(ResponseStream):
    """`_live` are the replicas that decode; the others have no rows. `_numbers`: of the names of all."""

    _live: range
    _numbers: dict[Any, int]

    def _start_with(self, live: range) -> None:
        """Only these replicas decode, and no group is placed yet."""
        self._live, self._numbers = live, {name: number for number, name in enumerate(self._chains)}
        for name, number in self._numbers.items():
            if number not in live:
                self._admission.lost(name)

    def _chain(self, number: int) -> tuple[str, ReplicaCalls]:
        name = f"{self._groups[0].name}/{number}"
        return name, self._chains[name]

    def _submit(self) -> None:
        """Queue calls for rows and groups that their replica does not have yet."""
        for number in self._live:
            chain = self._chain(number)[1]
            if chain.new or chain.rows:
                prompts = self._prompts.rows(sorted(chain.new)) if chain.new else None
                chain.issue(prompts, self._version_of(chain.group))

    @property
    def _submitted(self) -> bool:
        """Whether all rows are where they are decoded."""
        return not any(chain.new or chain.rows for _, chain in map(self._chain, self._live))

    def _hand_over(self, count: int) -> int:
        """The lowest `count` replicas stop. Returns the rows that moved."""
        leaving, self._live = self._live[:count], self._live[count:]
        names = {self._chain(number)[0] for number in leaving}
        moved = self._move([group for group in self._admission.under_way if self._admission.place(group) in names], {})
        for name in names:
            self._admission.lost(name)
        return moved

    def _join(self, count: int) -> None:
        """`count` replicas below the present ones start; groups that no replica has yet are spread over all."""
        if not count:
            return
        self._live = range(self._live.start - count, self._live.stop)
        for number in self._live:
            self._admission.joined(self._chain(number)[0])
        self._move([group for number in self._live for group in self._chain(number)[1].new], {})

    def _move(self, groups: Iterable[int], wanted: Mapping[int, int]) -> int:
        """Unfinished groups continue on the `wanted` replicas, or on those with the fewest rows: the cheapest first.
        Returns the rows that moved."""
        held: dict[int, list[Mapping[str, Any]]] = {}
        answers, offset, n = [], self._prompts.offset, self.options.n
        for chain, of_chain in self._by_chain(groups):
            fresh = of_chain & {*chain.new}
            waiting = [row for row in chain.rows if row["row_id"] - offset in of_chain]
            chain.new = [group for group in chain.new if group not in fresh]
            chain.rows = [row for row in chain.rows if row["row_id"] - offset not in of_chain]
            chain.unfinished -= len(fresh) * n + len(waiting)
            held |= {group: [] for group in fresh}
            for row in waiting:
                held.setdefault(row["row_id"] - offset, []).append(row)
            if submitted := of_chain - fresh:
                row_ids = sorted(group + offset for group in submitted)
                answers.append((chain, chain.group.withdraw_rows(replica=chain.replica, row_ids=row_ids)))
        for chain, answer in answers:
            rows = answer.get()
            chain.unfinished -= len(rows)
            for row in rows:
                held.setdefault(row["row_id"] - offset, []).append(row)
        self._take_up(self._chains.values())  # what has finished meanwhile
        cost = {n: sum(len(row["prompt_ids"]) + len(row["token_ids"]) for row in rows) for n, rows in held.items()}
        for group in sorted(held, key=cost.__getitem__):  # tokens whose keys and values another replica computes
            places = [self._chain(number) for number in self._live]
            name, chain = min(places, key=lambda place: place[1].unfinished)
            if wanted.get(group, -1) in self._live:
                name, chain = self._chain(wanted[group])
            self._admission.migrated(group, name)
            chain.rows += held[group]
            chain.new += [] if held[group] else [group]
            chain.unfinished += len(held[group]) or n
        self._admission.moved += sum(map(bool, held.values()))  # groups
        return sum(map(len, held.values()))

    def _by_chain(self, groups: Iterable[int]) -> list[tuple[ReplicaCalls, set[int]]]:
        found: dict[str, set[int]] = {}
        for group in groups:
            if (name := self._admission.place(group)) is not None:
                found.setdefault(str(name), set()).add(group)
        return [(self._chains[name], some) for name, some in found.items()]
