"""Admission: which groups of responses a stream starts, where, and which it gives to the trainer, by staleness. Pure.

A group is the n responses to one prompt. Groups are numbered in the order of their admission, which is the loader's
order; a batch is B = rows / n whole groups. Versions count weight updates, one per batch: batch k (0, 1, ...) is
trained at version k. Tokens carry the version that their rollout has, which is the trainer's of the last weight sync
(with several rollouts, the version of this file is that of the one synced longest ago)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

from hybridflow.errors import BatchError, ConfigError
from hybridflow.settings import Count, Size, require, settings

Replica: TypeAlias = int | str
_COUNTS = ("admitted", "given_up", "moved", "trained_batches", "version", "prompts_ended")


@settings
class StreamOptions:
    """Batches of `rows` rows, in groups of `n`; no token of a batch is more than `max_staleness` versions old.

    `on_stale="wait"`: a batch waits for the groups that must be in it. `on_stale="drop"`: these are given up."""

    rows: Size
    n: Size = 1
    max_staleness: Count
    on_stale: Literal["wait", "drop"] = "wait"

    def __post_init__(self) -> None:
        whole = self.rows % self.n == 0
        require(whole, f"rows={self.rows} of a batch are not whole groups of n={self.n} responses: give a multiple.")

    @property
    def groups(self) -> int:
        """B, the groups of a batch."""
        return self.rows // self.n


class StreamBatch(NamedTuple):
    """Batch `number`: its `groups`, in the order of admission, and the groups that are `given_up` from now on."""

    number: int
    groups: tuple[int, ...]
    given_up: tuple[int, ...]


@dataclass
class _Group:
    version: int
    """The rollouts' at admission: none of its tokens is older."""
    replica: Replica | None = None
    oldest: list[int] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
    """Of each finished response: its oldest version, its number of versions."""


class Admission:
    """The state of a stream, and what follows from it: plain numbers in, plain instructions out.

    Two rules keep staleness (k minus the version of the oldest token of batch k) within eta = `max_staleness`:

    1. Admission (Fu et al., "AReaL" (2025), section 5.1, equation 3): at most (v + eta + 1) B groups have ever been
       admitted, v being the version of the *rollouts*. (Without given up groups, which others replace.) If the loop
       trains more often than it syncs, v stays behind and less is admitted.
    2. Order: a group that was admitted at v may be trained until its deadline v + eta. A batch takes groups as they
       finish, except that it must contain enough groups of early deadlines: with U_j the groups, finished or not, that
       no batch has taken and whose deadline is at most j, batch k takes at least |U_j| - (j - k) B of each U_j, the
       earliest deadlines first. Until these have finished, the batch waits.

    At most B groups must be in a batch: before batch k, |U_j| <= (j - k + 1) B for all j. An admission at v leaves at
    most (d - k + 1) B groups with d = v + eta, and only U_j with j >= d have grown; batch k leaves at most (j - k) B of
    U_j. As the U_j are nested, a batch never waits for more than the B groups of earliest deadline. With eta = 0 only B
    groups are under way: the loop is the synchronous one.

    `on_stale="drop"`: when B groups have finished, the batch is made of finished groups, and unfinished groups that had
    to be in it are given up (of equal deadlines, those that were admitted last). Responses that take long are then
    under-represented.

    A group runs on one replica, so that its responses share the prompt; a new one on the replica with the fewest
    unfinished rows. When a replica is lost, its groups go to the others by the same rule, largest first."""

    def __init__(self, options: StreamOptions, replicas: Iterable[Replica]) -> None:
        self.options = options
        self.admitted = self.given_up = self.moved = 0  # groups
        self.taken = self.trained_batches = 0
        self.version = 0  # of the rollouts
        self.prompts_ended = False
        self._groups: dict[int, _Group] = {}  # those that no batch has taken
        self._complete: dict[int, None] = {}  # the finished ones, as they finished
        self._untrained: list[dict[int, _Group]] = []  # batches taken and not trained, from the oldest
        self._again: list[dict[int, _Group]] = []  # those of a saved state
        self._last: dict[str, float] = {}  # metrics of the last batch
        self._replicas = list(dict.fromkeys(replicas))
        require(len(self._replicas) > 0, "a stream needs a replica that generates, got none.")

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now."""
        room = (self.version + self.options.max_staleness + 1) * self.options.groups
        return 0 if self.prompts_ended else room - (self.admitted - self.given_up)

    @property
    def under_way(self) -> list[int]:
        return [number for number in self._groups if number not in self._complete]

    @property
    def ended(self) -> bool:
        """Whether no further batch will come; fewer than B groups may be left over."""
        return self.prompts_ended and len(self._groups) < self.options.groups and not self._again

    def admit(self, count: int) -> dict[int, Replica]:
        """Admits the next `count` prompts: group -> replica. Errors: ConfigError when more than `capacity`."""
        require(
            type(count) is int and 0 <= count <= self.capacity,
            f"{count!r} groups cannot be admitted: with rollouts of version {self.version} and "
            f"max_staleness={self.options.max_staleness} there is room for {self.capacity}.",
        )
        numbers = range(self.admitted, self.admitted + count)
        self._groups.update((number, _Group(self.version)) for number in numbers)
        self.admitted += count
        return self._place(numbers)

    def finished(self, group: int, responses: Sequence[Collection[int]] | None = None) -> bool:
        """Responses of the group have ended, each given as the versions of its tokens; None: all that were left, with
        the versions since the admission. Returns whether the group is complete. Errors: BatchError for a group that is
        not under way, more than n responses, and impossible versions."""
        found = self._unfinished(group)
        left = self._left(found)
        if responses is None:
            responses = [range(found.version, self.version + 1)] * left
        if len(responses) > left:
            raise BatchError(f"group {group} has {left} unfinished responses, {len(responses)} were reported to end.")
        for versions in responses:
            if versions and not found.version <= min(versions) <= max(versions) <= self.trained_batches:
                raise BatchError(
                    f"a response of group {group} has tokens of versions {sorted(versions)}: possible are "
                    f"{found.version}, the rollouts' at its admission, to {self.trained_batches}, the trainer's."
                )
        found.oldest += [min(versions, default=self.version) for versions in responses]
        found.spans += [max(1, len(set(versions))) for versions in responses]
        if not self._left(found):
            self._complete[group] = None
        return group in self._complete

    def restarted(self, group: int) -> dict[int, Replica]:
        """All responses of the group begin anew with the rollouts' version, because its tokens were lost: its replica.
        Errors: BatchError for a group that is not of the stream, or that a batch has taken."""
        if group not in self._groups:
            raise BatchError(f"group {group!r} cannot be restarted: no group that waits for a batch has this number.")
        self._groups[group] = _Group(self.version)
        self._complete.pop(group, None)
        return self._place([group])

    def next_batch(self) -> StreamBatch | None:
        """The next batch, or None while it has to wait for groups, and when the stream has `ended`. Errors: ConfigError
        when waiting is in vain: no group is under way, and none may be admitted before a sync."""
        if self._again:
            return self._take(self._again.pop(0), [])
        if len(self._complete) < self.options.groups:
            if not (self.capacity or self.ended or self.under_way):
                raise ConfigError(
                    f"batch {self.taken} cannot be filled: the rollouts have version {self.version}, and with "
                    f"max_staleness={self.options.max_staleness} no further prompt may start before they get version "
                    f"{self.taken - self.options.max_staleness}; {self.trained_batches} batches have been trained. "
                    f"Call hf.sync_weights(actor, rollout) after each update and before the next batch is taken, or "
                    f"raise max_staleness."
                )
            return None
        chosen, missing = self._compose()
        if missing and self.options.on_stale == "wait":
            return None
        for group in missing:
            del self._groups[group]
        self.given_up += len(missing)
        for group in chosen:
            del self._complete[group]
        return self._take({group: self._groups.pop(group) for group in sorted(chosen)}, missing)

    def trained(self) -> None:
        """The oldest batch that was taken has been trained, or the loop has no further use for it. Errors: ConfigError
        when every batch that was taken has been trained."""
        require(bool(self._untrained), f"all {self.taken} batches that the stream gave have been trained already.")
        self._untrained.pop(0)
        self.trained_batches += 1

    def synced(self, version: int | None = None) -> None:
        """The rollouts have the weights of `version` (None: the trainer's). Errors: ConfigError for another one."""
        new = self.trained_batches if version is None else version
        known = f"they have {self.version}, the trainer {self.trained_batches}"
        good = type(new) is int and self.version <= new <= self.trained_batches
        require(good, f"the rollouts cannot get version {new!r}: {known}.")
        self.version = new

    def lost(self, replica: Replica) -> dict[int, Replica]:
        """The replica is gone: group -> the replica that continues it. Without another replica they wait for one."""
        self._replicas = [other for other in self._replicas if other != replica]
        there = [number for number, group in self._groups.items() if group.replica == replica]
        for number in there:
            self._groups[number].replica = None
        unfinished = [number for number in there if self._left(self._groups[number])]
        self.moved += len(unfinished)
        return self._place(unfinished)

    def place(self, group: int) -> Replica | None:
        """The replica of a group that is under way; None for any other."""
        found = self._groups.get(group)
        return None if found is None or group in self._complete else found.replica

    def migrated(self, group: int, replica: Replica) -> None:
        """The unfinished rows of the group continue on this replica. Errors: BatchError for a group not under way."""
        self._unfinished(group).replica = replica

    def joined(self, replica: Replica) -> dict[int, Replica]:
        """A further replica generates: the waiting groups that it gets. New groups go to it first."""
        self._replicas = list(dict.fromkeys([*self._replicas, replica]))
        return self._place([number for number in self.under_way if self._groups[number].replica is None])

    def metrics(self) -> dict[str, float]:
        """`stream/staleness_{mean,max}` in versions and `stream/spans_{mean,max}` (policy versions per response) over
        the responses of the last batch; `stream/under_way` and `stream/finished`, groups that no batch has taken; and
        counts since the start: `stream/admitted`, `stream/dropped`, `stream/moved` (groups that lost their replica)."""
        finished = len(self._complete)
        counts = {"under_way": len(self._groups) - finished, "finished": finished, "admitted": self.admitted}
        counts |= {"dropped": self.given_up, "moved": self.moved}
        return self._last | {f"stream/{name}": float(value) for name, value in counts.items()}

    def state(self) -> dict[str, Any]:
        """State for `load_state`: plain data, for JSON. The executor keeps prompts and tokens by group number."""
        every = self._groups, *self._untrained, *self._again
        groups, *untrained = ([[number, asdict(group)] for number, group in batch.items()] for batch in every)
        return {
            "options": asdict(self.options),
            "counts": {name: getattr(self, name) for name in _COUNTS},
            "groups": groups,
            "complete": list(self._complete),
            "untrained": untrained,
        }

    def load_state(self, state: Mapping[str, Any], unreported: Collection[int] = ()) -> dict[int, Replica]:
        """Continue from a state on the present replicas: unfinished group -> its replica. Batches that were taken but
        not trained are given again. Responses of the groups `unreported` are reported as finished once more. Errors:
        ConfigError when it is not a state, or one of other rows, n or a larger max_staleness."""
        try:
            was, counts = dict(state["options"]), {name: state["counts"][name] for name in _COUNTS}
            groups, *again = ({g: _Group(**one) for g, one in rows} for rows in (state["groups"], *state["untrained"]))
            complete = {group: None for group in state["complete"] if groups[group]}
            if not all(isinstance(value, int) and value >= 0 for value in counts.values()):
                raise ValueError(counts)
            fits = (was["rows"], was["n"]) == (self.options.rows, self.options.n)
            fits = fits and was["max_staleness"] <= self.options.max_staleness
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the saved state is not one of a stream ({error!r}): give what state() gave.") from None
        require(fits, f"the saved stream had {was}, this one has {self.options}: give equal rows and n, and its bound.")
        for name, value in counts.items():
            setattr(self, name, value)
        self.taken = self.trained_batches
        self._groups, self._complete, self._again, self._untrained = groups, complete, again, []
        for number, group in groups.items():
            group.replica = None
            if number in unreported:
                group.oldest, group.spans = [], []
                complete.pop(number, None)
        return self._place(self.under_way)

    def _compose(self) -> tuple[set[int], list[int]]:
        """B finished groups, and unfinished ones that have to be in the batch, too."""
        size, eta = self.options.groups, self.options.max_staleness
        by_version: dict[int, list[int]] = {}
        for number, group in self._groups.items():
            by_version.setdefault(group.version, []).append(number)
        chosen: set[int] = set()
        missing: list[int] = []
        within: list[int] = []  # U_j with j = version + eta
        for version in sorted(by_version):
            within += by_version[version]
            needed = len(within) - len(missing) - (version + eta - self.taken) * size
            if (lacking := needed - len(chosen)) > 0:
                early = (n for n in self._complete if n not in chosen and self._groups[n].version <= version)
                chosen.update(found := list(islice(early, lacking)))
                unfinished = [n for n in within if n not in self._complete and n not in missing]
                missing += unfinished[len(unfinished) - (lacking - len(found)) :]
        rest = (number for number in self._complete if number not in chosen)
        return chosen.union(islice(rest, size - len(chosen))), missing

    def _take(self, groups: dict[int, _Group], given_up: list[int]) -> StreamBatch:
        number = self.taken
        ages = [number - oldest for group in groups.values() for oldest in group.oldest]
        assert max(ages) <= self.options.max_staleness, (number, ages)
        spans = [count for group in groups.values() for count in group.spans]
        self._last = {
            f"stream/{name}_{kind}": float(value)
            for name, values in (("staleness", ages), ("spans", spans))
            for kind, value in (("mean", sum(values) / len(values)), ("max", max(values)))
        }
        self._untrained.append(groups)
        self.taken += 1
        return StreamBatch(number, tuple(groups), tuple(sorted(given_up)))

    @property
    def _load(self) -> dict[Replica, int]:
        load = dict.fromkeys(self._replicas, 0)
        for group in self._groups.values():
            if group.replica in load:
                load[group.replica] += self._left(group)
        return load

    def _place(self, numbers: Iterable[int]) -> dict[int, Replica]:
        """A replica for each of these groups: the largest first, to the one with the fewest unfinished rows."""
        placed, load = dict[int, Replica](), self._load
        for number in sorted(numbers, key=lambda each: -self._left(self._groups[each])):
            if load:
                placed[number] = self._groups[number].replica = min(load, key=load.__getitem__)
                load[placed[number]] += self._left(self._groups[number])
        return placed

    def _unfinished(self, group: int) -> _Group:
        found = self._groups.get(group)
        if found is None or group in self._complete:
            raise BatchError(f"group {group!r} is not under way: {'complete' if found else 'not one of the stream'}.")
        return found

    def _left(self, group: _Group) -> int:
        return self.options.n - len(group.oldest)
