"""Agent: how the responses of a call come about over several turns, as the driver gives it and a model's host runs it.

driver: generate_sequences(batch, tools=...) -> Agent -> checked
host:   Agent -> AgentTurns (a RowSource) -> engine.serve -> AgentTurns.take, the trajectories that have ended
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from itertools import count
from typing import Annotated, Any, Literal, NamedTuple, Self

from hybridflow.config import Sampling
from hybridflow.data.encoded_image import MOST_PIXELS
from hybridflow.data.tokenizer import end_token_ids, has_tokenizer, load_tokenizer
from hybridflow.engines.contract import Row, derived_seed
from hybridflow.environments.acting import Act, EnvironmentLoop, Program, ToolLoop
from hybridflow.environments.rendering import ChatRenderer
from hybridflow.environments.session_process import SessionProcess
from hybridflow.environments.sessions import Asked, EndedTrajectory, Sessions
from hybridflow.environments.trajectory import GREEDY
from hybridflow.environments.turn_images import TurnImages
from hybridflow.errors import ConfigError, HybridFlowError, PromptError, RewardError, nearest
from hybridflow.models.hf_spec import image_tokens, read_spec
from hybridflow.settings import Check, Fraction, Size, require, settings

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
"""With on_failure="retry"."""
_ENOUGH = 8
"""Trajectories of which the share that failed says something."""
_CONVERSATIONS = 4
"""Of one trajectory that have their KV cache."""


_Tools = Annotated[tuple[Callable[..., Any], ...], Check("a list of functions", lambda t: isinstance(t, list | tuple))]
_Seconds = Annotated[
    float, Check("a number of seconds above 0", lambda s: isinstance(s, int | float) and s is not True and s > 0)
]


@settings
class Agent:
    """`tools`, an `environment` or `solve` of the user's own, and how they are run.

    The agents run in `workers` processes per generation replica, `concurrency` trajectories at once. A call of a tool,
    an environment or `solve` (between two turns of the model) may take `timeout` seconds. A trajectory whose
    environment failed is masked ("mask"), begun anew up to two times and then masked ("retry"), or an error ("raise").
    Where more than the share `max_failed` of a replica's trajectories failed, or all of them, that is an error, too (of
    at least eight, so that chance decides nothing). `processor` and `max_image_pixels` are those of a PromptLoader, for
    images that agents show; by default the processor is the model's own.
    """

    tools: _Tools = ()
    environment: Callable[[], Any] | None = None
    solve: Callable[..., Any] | None = None
    max_turns: Size = 8
    workers: Size = 1
    concurrency: Size = 256
    timeout: _Seconds = 60.0
    on_failure: Literal["mask", "retry", "raise"] = "mask"
    max_failed: Fraction = 1.0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    processor: Any = None
    max_image_pixels: Size = MOST_PIXELS

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> Self | None:
        """That of a call with these settings; None for plain generation. Errors: ConfigError."""
        own = {name: call[name] for name in AGENT_SETTINGS if name in call}
        if not own.get("tools") and own.get("environment") is None and own.get("solve") is None:
            given = [name for name in own if name not in ("tools", "environment", "solve")]
            require(
                not given, f"{', '.join(given)} without tools= or environment=: nothing would use it. Leave it out."
            )
            return None
        return cls(**own)

    def __post_init__(self) -> None:
        require(
            not (self.tools and self.environment is not None),
            "tools= and environment= together: make the tools methods of the environment.",
        )
        if self.solve is not None:
            require(
                inspect.iscoroutinefunction(inspect.unwrap(self.solve)),
                f"run(solve={self.solve!r}): give a function `async def solve(row, model)`.",
            )
        given = self.environment
        require(
            given is None or callable(given),
            f"environment={given!r}: give a class, or a function that makes an environment.",
        )
        if isinstance(given, type):
            require(hasattr(given, "reset"), f"environment={given.__name__}: it has no reset(**row).")
            require(
                hasattr(given, "step") or hasattr(given, "get_reward"),
                f"environment={given.__name__}: it needs step(text) -> (observation, reward, done), or get_reward() "
                f"beside public methods, which are tools.",
            )

    @property
    def rewards(self) -> bool:
        """Whether its trajectories have rewards."""
        return not self.tools

    @property
    def act(self) -> Act:
        if self.solve is not None:
            return Program(self.solve)
        if self.environment is not None:
            return EnvironmentLoop(self.environment, self.max_turns)
        return ToolLoop(self.tools, self.max_turns)

    def check(self, checkpoint: str, columns: Sequence[str]) -> None:
        """Errors: ConfigError and PromptError for what no trajectory could begin with."""
        what = "tools=" if self.tools else "environment=" if self.environment is not None else "run(...)"
        if not has_tokenizer(checkpoint):
            raise ConfigError(f"{what} talks with the model in texts, and {checkpoint} has no tokenizer. Add one.")
        schemas = list(getattr(self.act, "schemas", ()))
        names = [schema["function"]["name"] for schema in schemas]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, f"tools= has two tools named {', '.join(twice)}. The model calls tools by name: rename one.")
        if "row_id" not in columns:
            raise PromptError(f"{what} names trajectories by 'row_id', which this batch lacks. Add the column.")
        if self.tools and "prompt" not in columns:
            raise PromptError(
                "tools= needs the column 'prompt' (a text or chat messages), because the prompt and the tools are "
                "rendered together. This batch has none."
            )
        if self.processor is not None:
            images = self._images(checkpoint)
            require(images is not None, f"processor= is for images, and {checkpoint} reads text only. Leave it out.")
            _ = images and images.loaded
        if self.solve is None:
            _check_template(checkpoint, json.dumps(schemas), json.dumps(dict(self.chat_template_kwargs)))

    def sessions(self, checkpoint: str) -> Callable[[], Sessions]:
        """Makes its processes, which start when they are needed."""
        stop_ids = end_token_ids(checkpoint)
        images, options = self._images(checkpoint), dict(self.chat_template_kwargs)
        pixels = 0 if images is None else images.most_pixels
        process = SessionProcess(self.act, checkpoint, stop_ids, self.timeout, options, pixels)
        return partial(Sessions, process, self.workers, self.concurrency, images)

    def _images(self, checkpoint: str) -> TurnImages | None:
        if (tokens := image_tokens(checkpoint)) is None:
            return None
        context = read_spec(checkpoint, "lm").context
        return TurnImages(tokens, checkpoint, context, self.processor, self.max_image_pixels)

    @property
    def described(self) -> tuple[Any, ...]:
        """Its settings in plain values, equal on all ranks of a replica."""
        given = [*self.tools, self.environment, self.solve]
        names = [getattr(one, "__qualname__", type(one).__qualname__) for one in given]
        others = [one.name for one in fields(self) if one.name not in ("tools", "environment", "solve", "processor")]
        return (*names, *(getattr(self, name) for name in others), repr(self.processor))


AGENT_SETTINGS = tuple(Agent.__dataclass_fields__)
"""Settings of a call that are not those of the sampling."""


@lru_cache(maxsize=32)
def _check_template(checkpoint: str, schemas: str, options: str) -> None:
    _ = ChatRenderer(load_tokenizer(checkpoint), end_token_ids(checkpoint), json.loads(schemas), json.loads(options))


class Acted(NamedTuple):
    """A trajectory: how it began (a Row without tokens, whose counters are those of all turns), its row of the prompts,
    and its end."""

    begun: Row
    row: Mapping[str, Any]
    end: EndedTrajectory


@dataclass
class _UnderWay:
    begun: Row
    row: Mapping[str, Any]
    attempts: int
    past: dict[int, list[int]] = field(default_factory=dict)  # tokens of the last turn with an index


def _row_id(key: int) -> int:
    """Of the turns of a trajectory."""
    return -1 - key


def _sampling(usual: Sampling, given: Mapping[str, Any]) -> Sampling:
    """That of a turn, which may give its own; a temperature ends the call's `greedy`. Errors: ConfigError."""
    if "n" in given or "seed" in given:
        raise ConfigError(
            f"n and seed are the call's: a turn has one answer, whose draws follow from the call's seed, the prompt "
            f"and the number of the trajectory. Leave {'n' if 'n' in given else 'seed'} out of the turn."
        )
    if unknown := sorted(given.keys() - Sampling.__dataclass_fields__):
        raise ConfigError(f"{unknown[0]}= is no setting of a turn.{nearest(unknown[0], Sampling.__dataclass_fields__)}")
    return replace(usual, **({"greedy": False} if "temperature" in given else {}), **given)


class AgentTurns:
    """The agents of trajectories on the first rank of a replica: a RowSource of the model's turns.

    Trajectories are started at any time, and wait for `take` when they have ended. The source pauses when `reached()`.
    `sessions()` makes or finds the processes that run them, in the first poll, whose errors all ranks are given.
    `numbers` name trajectories and turns, unlike any other of the same engine.
    """

    def __init__(self, sessions: Callable[[], Sessions], on_failure: str, numbers: Iterator[int]) -> None:
        self._begin, self._numbers = sessions, numbers
        self._sessions: Sessions | None = None
        self._attempts = (_ATTEMPTS if on_failure == "retry" else 1) - 1
        self._new: list[int] = []  # to start with the next poll
        self._running: dict[int, _UnderWay] = {}
        self._asked: dict[str, Asked] = {}  # by the names of the rows under way
        self._done: list[str] = []
        self.ended: dict[int, Acted] = {}
        self.reached: Callable[[], bool] = lambda: False

    def start(self, begun: Sequence[Row], rows: Sequence[Mapping[str, Any]]) -> None:
        """Run the agent for each of `rows`, as `begun` names, seeds and samples it, with its images."""
        for first, row in zip(begun, rows, strict=True):
            self._new.append(key := next(self._numbers))
            self._running[key] = _UnderWay(replace(first, sampling=replace(first.sampling, n=1)), row, self._attempts)

    @property
    def under_way(self) -> int:
        return len(self._running)

    def groups(self) -> int:
        """Prompts with trajectories that have ended, and none under way."""
        open_ = {one.begun.row_id for one in self._running.values()}
        return len({one.begun.row_id for one in self.ended.values()} - open_)

    def take(self) -> list[Acted]:
        """The trajectories that have ended since the last call, in the order in which they were started."""
        found, self.ended = self.ended, {}
        return [one for _, one in sorted(found.items())]

    def withdraw(self, row_ids: Collection[int] | None, keep: bool) -> list[dict[str, Any]]:
        """`row_id` and `index` of the trajectories under way (of the prompts `row_ids`), which end, unless `keep`."""
        found = {k: one for k, one in self._running.items() if row_ids is None or one.begun.row_id in row_ids}
        if not keep:
            self._new = [key for key in self._new if key not in found]
            if self._sessions is not None:
                self._sessions.cancel(found.keys())
            for key, one in found.items():
                del self._running[key]
                self._forget(key, one)
        return [{"row_id": one.begun.row_id, "index": one.begun.index} for one in found.values()]

    def _forget(self, key: int, one: _UnderWay) -> None:
        self._done += [f"{_row_id(key)}.{index}" for index in one.past]
        one.past.clear()

    def poll(self, seconds: float) -> list[Row] | None:
        """The turns to sample next, waiting up to `seconds` for the first; None for a pause, and once all trajectories
        have ended."""
        if self.reached():
            return None
        sessions = self._sessions = self._begin() if self._sessions is None else self._sessions
        for key in self._new:
            one = self._running[key]
            sessions.start(key, one.row, one.begun.seed, one.begun.images)
        self._new.clear()
        asked = sessions.poll(seconds)
        for key, end in sessions.take().items():
            self._forget(key, one := self._running[key])
            if end.failure is not None and one.attempts:
                one.attempts -= 1
                again = derived_seed(one.begun.seed, (1 << 40) + one.attempts)
                sessions.start(key, one.row, again, one.begun.images)
            else:
                del self._running[key]
                self.ended[key] = Acted(one.begun, one.row, end)
        out = []
        for turn in asked:
            if (one := self._running.get(turn.key)) is None:
                continue
            try:
                sampling = _sampling(one.begun.sampling, turn.sampling)
            except (HybridFlowError, TypeError) as error:
                sessions.refuse(turn, str(error), full=False)
                continue
            own = {"kept": turn.images is None, "images": turn.images}  # what is kept knows no images
            row = Row(_row_id(turn.key), self._index(turn, one.past), turn.ids, sampling, turn.seed, **own)
            self._asked[row.name] = turn
            out.append(row)
        return out if out or self._running else None

    def finished(self, row: Row) -> None:
        """The engine has sampled this turn."""
        asked = self._asked.pop(row.name, None)  # None: of a source before
        if asked is None or (one := self._running.get(asked.key)) is None:
            self._done.append(row.name)
            return
        one.past[row.index] = row.prompt_ids + row.token_ids
        one.begun.prefilled += row.prefilled
        one.begun.recomputed += row.recomputed
        one.begun.spans += row.spans
        assert self._sessions is not None
        drawn = one.begun.sampling.greedy or not row.sampling.greedy
        temperature = row.sampling.policy_temperature if drawn else GREEDY
        self._sessions.answer(asked, row, temperature)

    def refused(self, row: Row, why: str, full: bool) -> None:
        """The engine cannot take this turn; `full`: its ids leave no room for a response."""
        assert self._sessions is not None
        self._sessions.refuse(self._asked.pop(row.name), why, full)

    def done(self) -> list[str]:
        """The names, since the last call, of rows that no further turn continues: their trajectories have ended."""
        found, self._done = self._done, []
        return [name for name in found if name not in self._asked]

    def _index(self, asked: Asked, past: Mapping[int, list[int]]) -> int:
        """The index of a row whose KV cache holds most of what was asked, or of none."""
        row_id = _row_id(asked.key)
        free = {index: ids for index, ids in past.items() if f"{row_id}.{index}" not in self._asked}
        fitting = [index for index, ids in free.items() if asked.ids[: len(ids)] == ids]
        if fitting:
            return max(fitting, key=lambda index: len(free[index]))
        if len(free) >= _CONVERSATIONS:
            return next(iter(free))
        return next(index for index in count() if index not in past and f"{row_id}.{index}" not in self._asked)


def report_failures(ended: Collection[Acted], agent: Agent) -> None:
    """Logs a warning with the first trajectories whose environment failed. Errors: RewardError instead, where the
    agent says so, and where too many failed."""
    failed = [(one.begun.row_id, one.end.failure) for one in ended if one.end.failure is not None]
    if not failed:
        return
    named = "; ".join(f"row {row_id}: {why}" for row_id, why in failed[:3])
    text = f"the environments of {len(failed)} of {len(ended)} trajectories failed: {named}."
    if agent.on_failure == "raise":
        raise RewardError(f'{text} on_failure="mask" or "retry" would train on the others.')
    if len(ended) >= _ENOUGH and (len(failed) == len(ended) or len(failed) > agent.max_failed * len(ended)):
        raise RewardError(f"{text} The limit is max_failed={agent.max_failed:g}, and all of them are always too many.")
    logger.warning("%s They are masked.", text)
