"""Streams of groups against random schedules: nothing lost, nothing twice, groups whole, the bound never exceeded."""

from __future__ import annotations

import json
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import BatchError, ConfigError
from hybridflow.planner.admission import Admission, StreamBatch, StreamOptions

REPLICAS = ("a", "b", "c")


class Schedule:
    """An executor with random speeds. It keeps its own books of tokens, versions and places, and checks the policy."""

    def __init__(self, options: StreamOptions, random: Random) -> None:
        self.options, self.random = options, random
        self.policy = Admission(options, REPLICAS)
        self.replicas = set(REPLICAS)
        self.rows: dict[int, list[set[int] | None]] = {}  # versions of each response's tokens, None once it has ended
        self.oldest: dict[int, int] = {}
        self.place: dict[int, str | None] = {}
        self.taken: list[tuple[int, ...]] = []
        self.batch_of: list[tuple[int, ...]] = []  # taken and not trained
        self.dropped: set[int] = set()
        self.trained = self.version = self.admitted = 0
        self.finish_order: list[int] = []

    def admit(self) -> None:
        count = self.random.randint(0, self.policy.capacity)
        placed = self.policy.admit(count)
        for number in range(self.admitted, self.admitted + count):
            self.rows[number] = [set() for _ in range(self.options.n)]
            self.place[number] = None
        self.admitted += count
        self.move(placed, count)

    def move(self, placed: dict, expected: int) -> None:
        assert len(placed) == (expected if self.replicas else 0)
        assert set(placed.values()) <= self.replicas
        self.place |= placed

    def unfinished(self) -> list[int]:
        return [number for number, rows in self.rows.items() if any(row is not None for row in rows)]

    def decode(self) -> None:
        """Some rows get tokens of the rollouts' version; some of them end."""
        for number in self.unfinished():
            for i, row in enumerate(self.rows[number]):
                if row is not None and self.place[number] and self.random.random() < 0.5:
                    row.add(self.version)
                    if self.random.random() < 0.4:
                        self.end(number, i)

    def end(self, number: int, i: int) -> None:
        row = self.rows[number][i]
        assert row is not None
        self.rows[number][i] = None
        self.oldest[number] = min(self.oldest.get(number, self.version), *row, self.version)
        whole = self.policy.finished(number, [row])
        assert whole == all(row is None for row in self.rows[number])
        if whole:
            self.finish_order.append(number)

    def take(self) -> StreamBatch | None:
        ready = self.ready() if len(self.finish_order) <= 9 and self.options.on_stale == "wait" else None
        again = bool(self.policy._again)
        batch = self.policy.next_batch()
        if batch is None:
            assert not ready
            return None
        assert ready or ready is None or again
        assert batch.number == len(self.taken)
        assert list(batch.groups) == sorted(batch.groups)
        assert len(batch.groups) == self.options.groups
        assert not batch.given_up or self.options.on_stale == "drop"
        for number in batch.given_up:
            assert any(row is not None for row in self.rows.pop(number))
            self.dropped.add(number)
        for number in batch.groups:
            assert all(row is None for row in self.rows.pop(number))  # whole, and not taken before
            assert len(self.taken) - self.oldest[number] <= self.options.max_staleness
            self.finish_order.remove(number)
        found = self.policy.metrics()
        ages = [len(self.taken) - self.oldest[number] for number in batch.groups]
        assert found["stream/staleness_max"] == max(ages)
        assert found["stream/dropped"] == len(self.dropped)
        self.taken.append(batch.groups)
        self.batch_of.append(batch.groups)
        return batch

    def ready(self) -> bool:
        """By brute force: whether B finished groups can be taken so that all others can still be taken in time."""
        size, k = self.options.groups, len(self.taken)
        deadlines = {g: self.policy._groups[g].version + self.options.max_staleness for g in self.rows}
        for chosen in combinations(self.finish_order, size):
            left = [deadline for number, deadline in deadlines.items() if number not in chosen]
            if all(sum(deadline <= j for deadline in left) <= (j - k) * size for j in set(left)):
                return True
        return False

    def stands_still(self) -> bool:
        """Nothing is under way, and without a sync nothing may start."""
        behind = len(self.taken) - self.version - self.options.max_staleness
        return behind > 0 and not self.unfinished() and len(self.finish_order) < self.options.groups

    def train(self) -> None:
        if self.batch_of:
            self.batch_of.pop(0)
            self.policy.trained()
            self.trained += 1

    def sync(self) -> None:
        self.version = self.random.randint(self.version, self.trained)
        self.policy.synced(self.version)

    def lose(self) -> None:
        if self.replicas and self.random.random() < 0.5:
            lost = self.random.choice(sorted(self.replicas))
            self.replicas.remove(lost)
            groups = [g for g in self.unfinished() if self.place[g] == lost]
            for number in groups:
                self.place[number] = None
            moves = self.policy.lost(lost)
            assert set(moves) == (set(groups) if self.replicas else set())
            self.move(moves, len(groups))
        elif missing := sorted(set(REPLICAS) - self.replicas):
            waiting = sum(self.place[g] is None for g in self.unfinished())
            self.replicas.add(missing[0])
            self.move(self.policy.joined(missing[0]), waiting)

    def restart(self) -> None:
        if self.rows:
            number = self.random.choice(sorted(self.rows))
            self.rows[number] = [set() for _ in range(self.options.n)]
            self.oldest.pop(number, None)
            self.place[number] = None
            self.finish_order = [other for other in self.finish_order if other != number]
            self.move(self.policy.restarted(number), 1)

    def checkpoint(self) -> None:
        """Batches that were taken and not trained come again, unchanged."""
        state = json.loads(json.dumps(self.policy.state()))
        self.policy = Admission(self.options, sorted(self.replicas) or REPLICAS)
        self.replicas = self.replicas or set(REPLICAS)
        unfinished = self.unfinished()
        placed = self.policy.load_state(state)
        assert json.loads(json.dumps(self.policy.state())) | {"groups": 0} == state | {"groups": 0}
        assert sorted(placed) == unfinished
        self.place |= placed
        again, self.batch_of = self.batch_of, []
        for groups in again:
            batch = self.policy.next_batch()
            assert batch == StreamBatch(self.taken.index(groups), groups, ())
            self.batch_of.append(groups)

    def finish(self) -> None:
        """A loop that trains and syncs never stands still."""
        self.replicas = self.replicas or {"d"}
        self.move(self.policy.joined(min(self.replicas)), sum(self.place[g] is None for g in self.unfinished()))
        for _ in range(2 * self.options.max_staleness + 4):
            while self.batch_of:
                self.train()
            self.version = self.trained
            self.policy.synced()
            count = self.policy.capacity
            self.rows |= {number: [set() for _ in range(self.options.n)] for number in range(*self.ahead(count))}
            self.move(self.policy.admit(count), count)
            for number in self.unfinished():
                for i, row in enumerate(self.rows[number]):
                    if row is not None:
                        self.end(number, i)
            assert self.take() is not None

    def ahead(self, count: int) -> tuple[int, int]:
        self.admitted += count
        return self.admitted - count, self.admitted


def random_options(random: Random) -> StreamOptions:
    n = random.randint(1, 3)
    return StreamOptions(
        rows=n * random.randint(1, 4),
        n=n,
        max_staleness=random.choice([0, 0, 1, 1, 2, 3, 4]),
        on_stale=random.choice(["wait", "wait", "drop"]),
    )


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 2**32))
def test_random_schedules_keep_every_promise(seed: int):
    random = Random(seed)
    schedule = Schedule(random_options(random), random)
    acts = [schedule.admit, schedule.decode, schedule.take, schedule.train, schedule.sync]
    rare = [schedule.lose, schedule.restart, schedule.checkpoint]
    weights = [random.random() for _ in acts] + [0.1 * random.random() for _ in rare]
    for _ in range(80):
        act = random.choices(acts + rare, weights)[0]
        if act == schedule.take and schedule.stands_still():
            with pytest.raises(ConfigError, match=r"hf\.sync_weights"):
                act()
        else:
            act()
        load = dict.fromkeys(schedule.replicas, 0)
        for number in schedule.unfinished():
            if (place := schedule.place[number]) is not None:
                load[place] += sum(row is not None for row in schedule.rows[number])
        assert schedule.policy._load == load
    schedule.finish()
    seen = [number for groups in schedule.taken for number in groups]
    assert len(set(seen)) == len(seen)
    assert set(seen) | schedule.dropped | set(schedule.rows) == set(range(schedule.admitted))
    assert not set(seen) & (schedule.dropped | set(schedule.rows))
    if schedule.options.max_staleness == 0:
        assert seen == list(range(len(seen)))
        assert not schedule.dropped


def stream(rows: int = 2, n: int = 1, eta: int = 2, on_stale: str = "wait") -> Admission:
    return Admission(StreamOptions(rows=rows, n=n, max_staleness=eta, on_stale=on_stale), ["a", "b"])  # type: ignore[arg-type]


def update(policy: Admission) -> None:
    policy.trained()
    policy.synced()


def test_a_batch_has_the_groups_that_finished_first_in_the_order_of_admission():
    policy = stream(rows=3, eta=1)
    assert policy.admit(policy.capacity) == {0: "a", 1: "b", 2: "a", 3: "b", 4: "a", 5: "b"}
    for group in (4, 2, 0):
        assert policy.next_batch() is None
        policy.finished(group)
    policy.finished(1)
    assert policy.next_batch() == StreamBatch(0, (0, 2, 4), ())


def test_a_batch_waits_for_groups_that_later_batches_could_not_all_take():
    """Two batches of 2 are left for the 6 groups of version 0 once batch 0 is full: batch 1 can take no newer one."""
    policy = stream()
    policy.admit(6)
    policy.finished(0), policy.finished(1)
    assert policy.next_batch() == StreamBatch(0, (0, 1), ())
    update(policy)
    policy.admit(2)
    policy.finished(6), policy.finished(7)
    assert policy.next_batch() is None
    policy.finished(5), policy.finished(3)
    assert policy.next_batch() == StreamBatch(1, (3, 5), ())
    assert policy.next_batch() is None


def test_drop_gives_up_the_same_groups_instead():
    policy = stream(on_stale="drop")
    policy.admit(6)
    policy.finished(0), policy.finished(1)
    assert policy.next_batch() == StreamBatch(0, (0, 1), ())
    update(policy)
    assert policy.capacity == 2
    policy.admit(2)
    policy.finished(6)
    assert policy.next_batch() is None  # one finished group is not a batch: nothing is given up yet
    policy.finished(7)
    assert policy.next_batch() == StreamBatch(1, (6, 7), (4, 5))
    assert policy.capacity == 2  # others take their places
    assert policy.metrics()["stream/dropped"] == 2
    with pytest.raises(BatchError, match="group 4 is not under way"):
        policy.finished(4)


def test_capacity_follows_the_weights_of_the_rollouts_and_not_the_trainers():
    policy = stream(eta=1)
    for batch in range(2):
        policy.admit(policy.capacity)
        for group in policy.under_way:
            policy.finished(group)
        assert policy.next_batch() == StreamBatch(batch, (2 * batch, 2 * batch + 1), ())
        policy.trained()
    assert policy.capacity == 0
    with pytest.raises(ConfigError, match=r"batch 2 cannot be filled: .*version 0.*they get version 1.*sync_weights"):
        policy.next_batch()
    policy.synced(1)
    assert policy.capacity == 2


def test_a_stream_ends_with_its_prompts():
    policy = stream(rows=2, eta=2)
    policy.admit(5)
    policy.prompts_ended = True
    assert policy.capacity == 0
    for group in range(5):
        policy.finished(group)
    assert policy.next_batch()
    assert not policy.ended
    assert policy.next_batch()
    assert policy.ended
    assert policy.next_batch() is None


def test_staleness_and_spans_are_those_of_the_tokens():
    policy = stream(rows=2, n=2, eta=1)
    policy.admit(2)
    policy.finished(1, [{0}, {0}])
    assert policy.next_batch()
    update(policy)
    policy.finished(0, [{1}])
    policy.finished(0, [{0, 1}])
    assert policy.next_batch()
    found = policy.metrics()
    assert (found["stream/staleness_mean"], found["stream/staleness_max"]) == (0.5, 1.0)
    assert (found["stream/spans_mean"], found["stream/spans_max"]) == (1.5, 2.0)


def test_groups_go_where_the_fewest_rows_are_under_way():
    policy = stream(rows=8, n=2, eta=0)
    assert policy.admit(3) == {0: "a", 1: "b", 2: "a"}
    policy.finished(2, [{0}])
    policy.finished(0)
    assert policy.admit(1) == {3: "a"}  # 1 row there, 2 on b
    assert policy.lost("a") == {2: "b", 3: "b"}
    assert policy.metrics()["stream/moved"] == 2
    assert policy.lost("b") == {}
    assert policy.joined("c") == {1: "c", 3: "c", 2: "c"}


def test_a_state_is_of_one_stream():
    policy = stream()
    policy.admit(3)
    state = policy.state()
    for other in (stream(rows=4), stream(n=2), stream(eta=1)):
        with pytest.raises(ConfigError, match="the saved stream had"):
            other.load_state(state)
    text = {**state, "counts": {**state["counts"], "version": "0"}}
    for bad in (
        {},
        text,
        {**state, "complete": [9]},
        {**state, "groups": [[1, {"size": 2}]]},
        {**state, "counts": {}},
        {**state, "untrained": 3},
    ):
        with pytest.raises(ConfigError, match="not one of a stream"):
            policy.load_state(bad)
    assert stream(eta=3).load_state(state) == {0: "a", 1: "b", 2: "a"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 8, "max_staleness": -1}, "max_staleness=-1"),
        ({"rows": 8, "max_staleness": 1.0}, "max_staleness=1.0"),
        ({"rows": 8, "max_staleness": True}, "max_staleness=True"),
        ({"rows": 8, "max_staleness": None}, "max_staleness=None"),
        ({"rows": 0, "max_staleness": 1}, "rows=0"),
        ({"rows": 8, "n": 3, "max_staleness": 1}, "rows=8 .*n=3"),
        ({"rows": 8, "n": 0, "max_staleness": 1}, "n=0"),
        ({"rows": 8, "max_staleness": 1, "on_stale": "skip"}, "on_stale='skip'"),
        ({"rows": 8}, "needs max_staleness="),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        StreamOptions(**options)


def test_wrong_reports_are_refused():
    policy = stream(rows=2, n=2, eta=1)
    with pytest.raises(ConfigError, match="needs a replica"):
        Admission(policy.options, [])
    with pytest.raises(ConfigError, match=r"3 groups cannot be admitted: .*room for 2"):
        policy.admit(3)
    policy.admit(2)
    for group, responses, message in (
        (7, None, "group 7 is not under way"),
        (0, [{0}] * 3, "has 2 unfinished responses, 3 were"),
        (0, [{1}], r"versions \[1\]: possible are 0, .* to 0, the trainer"),
    ):
        with pytest.raises(BatchError, match=message):
            policy.finished(group, responses)
    assert policy.metrics()["stream/under_way"] == 2
    for version in (1, -1, "1"):
        with pytest.raises(ConfigError, match="the rollouts cannot get version"):
            policy.synced(version)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="have been trained already"):
        policy.trained()
