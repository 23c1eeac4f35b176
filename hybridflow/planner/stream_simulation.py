"""What asynchrony gains: generation and training on separate devices, event by event, under the admission of streams.

The simulation acts on the same `Admission` as a stream, so that it predicts the policy itself. Pure."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from random import Random
from statistics import NormalDist
from typing import Annotated, Any

from hybridflow.config import KV
from hybridflow.planner.admission import Admission, StreamOptions
from hybridflow.planner.cost.cache_places import CachedRow, CachePrices, cache_places, place_seconds
from hybridflow.settings import Check, Count, NonNegative, Positive, Size, is_number, require, settings

TAIL = NormalDist().inv_cdf(0.999)
Ratio = Annotated[float, Check("a number of at least 1", lambda value: is_number(value) and value >= 1)]


@settings
class DecodingSpeed:
    """A decoding step of one replica with m rows takes `base` + m `per_row` seconds; computing the keys and values of
    prompts and of interrupted rows `prefill` seconds per token, and for an interrupted row of n tokens n^2 `attention`
    more. Up to `slots` rows are decoded at once."""

    base: NonNegative
    per_row: NonNegative
    prefill: NonNegative = 0.0
    attention: NonNegative = 0.0
    slots: Size = 256

    def __post_init__(self) -> None:
        require(self.base + self.per_row > 0, "DecodingSpeed: a step takes time: give base or per_row above 0.")

    @classmethod
    def fitted(cls, few: tuple[int, float], many: tuple[int, float], **others: Any) -> DecodingSpeed:
        """From two measurements (rows, seconds of a step). Errors: ConfigError when more rows are not slower."""
        (m, seconds), (more, longer) = few, many
        require(
            m < more and seconds <= longer <= seconds * more / m,
            f"a step of {m} rows took {seconds:g} s and one of {more} rows {longer:g} s: give the step of fewer rows "
            f"first; that of more rows takes longer, but not more than in proportion.",
        )
        per_row = (longer - seconds) / (more - m)
        return cls(base=max(0.0, seconds - m * per_row), per_row=per_row, **others)

    def step(self, rows: int) -> float:
        return self.base + rows * self.per_row


@settings
class ResponseLengths:
    """Lognormal: one in a thousand responses is longer than `ratio` medians, and cut there."""

    median: Positive
    ratio: Ratio

    def draw(self, random: Random) -> int:
        factor = math.exp(math.log(self.ratio) / TAIL * random.gauss(0.0, 1.0))
        return max(1, round(self.median * min(factor, self.ratio)))


def drawn(lengths: ResponseLengths | Sequence[int], random: Random) -> Iterator[int]:
    """Tokens of one response after the other, without end: of a distribution, or the given ones, again from the first
    when they end. Errors: ConfigError for others."""
    if isinstance(lengths, ResponseLengths):
        return (lengths.draw(random) for _ in count())
    good = len(lengths) > 0 and all(type(tokens) is int and tokens > 0 for tokens in lengths)
    require(good, f"lengths={str(lengths)[:80]}: give numbers of tokens above 0, or ResponseLengths.")
    return cycle(lengths)


@settings
class StreamRun:
    """A loop that trains `batches` batches of a stream; seconds and tokens.

    With `max_staleness=0` this is the synchronous loop: on one set of devices if replicas and training use all of them,
    since they alternate. `whole_batches` with `max_staleness=1` is one-step-off: prompts start, and weights arrive,
    between two batches only. Of `lengths` that are given, each is that of a response in the order of admission, again
    from the first when they end. Keys and values of rows under way are during a sync where `kv` says, at the prices of
    `cache`; a replica has room in device memory for those of `cache_room` tokens (None: of all)."""

    options: StreamOptions
    replicas: Size
    speed: DecodingSpeed
    lengths: ResponseLengths | Sequence[int]
    prompt_tokens: Count = 0
    train_seconds: NonNegative = 0.0  # of a batch
    train_seconds_per_token: NonNegative = 0.0  # of its prompts and responses
    sync_seconds: NonNegative = 0.0  # of the trainer and of all replicas
    report_seconds: NonNegative = 0.0  # until the end of a response is known, as of replicas that report after calls
    kv: KV = "recompute"
    cache: CachePrices = CachePrices(offload=0.0)  # per token, not per byte
    cache_room: NonNegative | None = None
    whole_batches: bool = False
    cores: Positive | None = None  # that busy replicas and training share, all slower alike (None: one for each)
    train_processes: Size = 1
    batches: Size = 16
    warm_up: Count = 4
    seed: Count = 0

    def __post_init__(self) -> None:
        given = f"StreamRun(batches={self.batches}, warm_up={self.warm_up})"
        require(self.warm_up < self.batches, f"{given}: more batches than those that do not count.")
        drawn(self.lengths, Random(self.seed))


@dataclass(frozen=True, kw_only=True)
class SimulatedStream:
    rows_per_second: float
    """After the warm-up."""
    trainer_busy: float
    rollout_busy: float
    """Shares of all time in which the trainer trains, and in which the mean replica has rows."""
    recomputed: float
    """Tokens whose keys and values were computed again, per token that was decoded."""
    staleness_mean: float
    staleness_max: float
    """Over batches."""
    given_up: int


def simulate_stream(run: StreamRun) -> SimulatedStream:
    """The run, event by event; equal for equal seeds."""
    return _StreamSimulation(run).run()


@dataclass
class DecodedRow:
    """`length` tokens are decoded, after the keys and values of `context` tokens were computed; other replicas have
    decoded `before` tokens of the response."""

    group: int
    length: int
    context: int = 0
    before: int = 0
    version: int = 0  # of its first token here


@dataclass
class DecodingReplica:
    """Rows that are decoded by `steps` (in number, since the start), after `stalled` seconds of other work."""

    speed: DecodingSpeed
    now: float = 0.0
    steps: float = 0.0
    stalled: float = 0.0
    starts: float = 0.0  # the sum over running rows of the step at which each began
    running: list[tuple[float, int, DecodedRow]] = field(default_factory=list)  # a heap by last step
    waiting: deque[DecodedRow] = field(default_factory=deque)

    def pass_until(self, time: float) -> None:
        elapsed, self.now = time - self.now, time
        other = min(elapsed, self.stalled)
        self.stalled -= other
        if self.running:
            self.steps += (elapsed - other) / self.speed.step(len(self.running))

    def next_end(self) -> float:
        if not self.running:
            return math.inf
        return self.now + self.stalled + max(0.0, self.running[0][0] - self.steps) * self.speed.step(len(self.running))

    def decoded(self) -> float:
        return max(0.0, len(self.running) * self.steps - self.starts)

    def tokens(self) -> Iterator[tuple[DecodedRow, int]]:
        """Of each row the tokens that it has, with those from other replicas."""
        for end, _, row in self.running:
            left = min(row.length, max(1, math.ceil(end - self.steps - 1e-6)))
            yield row, row.before + row.length - left
        yield from ((row, row.before) for row in self.waiting)


class Decoding:
    """Replicas, and the ends of their rows.

    Everything happens at times (`now`) of a machine with a core for each process; `clock` is the time on one with
    `cores`, where all that are busy are slower alike if they are more."""

    def __init__(self, speed: DecodingSpeed, replicas: Iterable[int], cores: float | None) -> None:
        self.replicas = {number: DecodingReplica(speed) for number in replicas}
        self.busy: set[int] = set()  # replicas that have rows
        self.cores = cores or math.inf
        self.now = self.clock = 0.0
        self._ends: list[tuple[float, int]] = []  # a replica's next end; out of date where it is no longer that
        self._begun = 0  # rows

    def pass_until(self, time: float, others: int = 0) -> float:
        """No process becomes busy or idle meanwhile; returns how much slower the given machine is, on which `others`
        are busy, too."""
        slower = max(1.0, (len(self.busy) + others) / self.cores)
        self.clock += (time - self.now) * slower
        self.now = time
        return slower

    def next_end(self) -> float:
        while self._ends:
            time, number = self._ends[0]
            if number in self.replicas and self.replicas[number].next_end() <= time + 1e-9 * (1.0 + time):
                return time
            heapq.heappop(self._ends)  # an earlier forecast
        return math.inf

    def finished(self, version: int = 0) -> DecodedRow:
        """The row that ends at `next_end`, now."""
        _, number = heapq.heappop(self._ends)
        replica = self.replicas[number]
        replica.pass_until(self.now)
        end, _, row = heapq.heappop(replica.running)
        replica.starts -= end - row.length
        self.refill(number, version)
        return row

    def refill(self, number: int, version: int = 0) -> None:
        """Waiting rows take free slots, with weights of this version."""
        replica = self.replicas[number]
        replica.pass_until(self.now)
        while replica.waiting and len(replica.running) < replica.speed.slots:
            row = replica.waiting.popleft()
            row.version, self._begun = version, self._begun + 1
            heapq.heappush(replica.running, (replica.steps + row.length, self._begun, row))
            replica.starts += replica.steps
            replica.stalled += row.context * replica.speed.prefill
        if replica.running:
            self.busy.add(number)
            heapq.heappush(self._ends, (replica.next_end(), number))
        else:
            self.busy.discard(number)

    def withdraw(self, groups: Container[int]) -> dict[int, list[DecodedRow]]:
        """The rows of these groups leave, of each replica that has some, with their tokens as context; it is not
        refilled."""
        found: dict[int, list[DecodedRow]] = {}
        for number, replica in self.replicas.items():
            replica.pass_until(self.now)
            gone = ((row, tokens) for row, tokens in replica.tokens() if row.group in groups)
            if rows := [DecodedRow(row.group, row.before + row.length - n, n, n) for row, n in gone]:
                found[number] = rows
                replica.running = [entry for entry in replica.running if entry[2].group not in groups]
                heapq.heapify(replica.running)
                replica.starts = sum(end - row.length for end, _, row in replica.running)
                replica.waiting = deque(row for row in replica.waiting if row.group not in groups)
        return found


class _StreamSimulation(Decoding):
    """With a trainer that is idle, or busy until `trained_at` and then syncs."""

    def __init__(self, run: StreamRun) -> None:
        super().__init__(run.speed, range(run.replicas), run.cores)
        self.given, self.lengths = run, drawn(run.lengths, Random(run.seed))
        self.policy = Admission(run.options, range(run.replicas))
        self.tokens: dict[int, int] = {}  # of each group that no batch has taken, prompts included
        self.trains_from = self.trained_at = self.synced_at = 0.0
        self.trainer_busy = self.rollout_busy = 0.0
        self.ended: deque[tuple[float, int, range]] = deque()  # rows whose end is not known: when, group, versions
        self.training = self.unsynced = False
        self.tokens_decoded, self.recomputed = 0, 0.0
        self.ends: list[float] = []
        self.staleness: list[tuple[float, float]] = []

    def run(self) -> SimulatedStream:
        run = self.given
        self.admit()
        while len(self.ends) < run.batches:
            row_end, known = self.next_end(), self.ended[0][0] if self.ended else math.inf
            if self.training and self.trained_at <= min(row_end, known):
                self.pass_until(self.trained_at)
                self.training, self.unsynced = False, True
                self.ends.append(self.clock)
                self.policy.trained()
                self.proceed()
            elif known <= row_end:  # the end of a row becomes known
                self.pass_until(known)
                _, group, versions = self.ended.popleft()
                if group in self.tokens and self.policy.finished(group, [versions]):
                    self.proceed()
            else:
                self.pass_until(row_end)
                row = self.finished(self.policy.version)
                self.tokens_decoded += row.length
                versions = range(row.version, self.policy.version + 1)
                self.ended.append((self.now + run.report_seconds, row.group, versions))
        seconds = self.ends[-1] - (self.ends[run.warm_up - 1] if run.warm_up else 0.0)
        means, maxima = zip(*self.staleness, strict=True)
        return SimulatedStream(
            rows_per_second=(run.batches - run.warm_up) * run.options.rows / seconds if seconds else math.inf,
            trainer_busy=self.trainer_busy / self.clock,
            rollout_busy=self.rollout_busy / run.replicas / self.clock,
            recomputed=self.recomputed / max(1, self.tokens_decoded),
            staleness_mean=sum(means) / len(means),
            staleness_max=max(maxima),
            given_up=self.policy.given_up,
        )

    def pass_until(self, time: float, others: int = 0) -> float:
        elapsed, training = time - self.now, max(0.0, time - max(self.now, self.trains_from)) if self.training else 0.0
        slower = super().pass_until(time, others + (self.given.train_processes if training else 0))
        self.trainer_busy += training * slower
        self.rollout_busy += len(self.busy) * elapsed * slower
        return slower

    def proceed(self) -> None:
        """Whatever follows at once: a sync, further prompts, the next batch."""
        run = self.given
        if self.unsynced and not (run.whole_batches and self.policy.under_way):
            self.sync()
        if not self.training and not self.unsynced and (batch := self.policy.next_batch()) is not None:
            found = self.policy.metrics()
            self.staleness.append((found["stream/staleness_mean"], found["stream/staleness_max"]))
            gone = set(batch.given_up)  # their rows leave the replicas at once
            for number in self.withdraw(gone) if gone else ():
                self.refill(number, self.policy.version)
            for group in gone:
                del self.tokens[group]
            tokens = sum(self.tokens.pop(group) for group in batch.groups)
            self.training, self.trains_from = True, max(self.now, self.synced_at)
            self.trained_at = self.trains_from + (run.train_seconds + tokens * run.train_seconds_per_token)
        self.admit()

    def admit(self) -> None:
        run, count = self.given, self.policy.capacity
        if not count or (run.whole_batches and self.policy.under_way):
            return
        count = min(count, run.options.groups) if run.whole_batches else count
        for group, replica in self.policy.admit(count).items():
            lengths = list(islice(self.lengths, run.options.n))
            self.tokens[group] = sum(lengths) + len(lengths) * run.prompt_tokens
            self.replicas[int(replica)].waiting.extend(DecodedRow(group, n, run.prompt_tokens) for n in lengths)
        for number in self.replicas:
            self.refill(number, self.policy.version)

    def sync(self) -> None:
        """The trainer waits for it like the replicas."""
        self.unsynced, self.synced_at = False, self.now + self.given.sync_seconds
        self.policy.synced()
        for number, replica in self.replicas.items():
            replica.pass_until(self.now)
            replica.stalled += self.given.sync_seconds + self.interrupted(replica)
            self.refill(number, self.policy.version)

    def interrupted(self, replica: DecodingReplica) -> float:
        """Seconds until the keys and values of a replica's rows are there again."""
        run, speed = self.given, self.given.speed
        done = (row.context + max(0.0, replica.steps - end + row.length) for end, _, row in replica.running)
        rows = [CachedRow(n, n * (speed.prefill + n * speed.attention)) for n in done if n]
        places = cache_places(run.kv, rows, run.cache, math.inf if run.cache_room is None else run.cache_room)
        self.recomputed += sum(row.nbytes for row, place in zip(rows, places, strict=True) if place == "recompute")
        return place_seconds(rows, places, run.cache)
