"""Generation of a worker (paper, table 4): responses to a batch in one call, or a session of rows across calls."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybridflow.algorithms.masked import row_column, token_column
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.config import VLLM, Sampling, Until
from hybridflow.data.tokenizer import end_token_ids, has_tokenizer, load_tokenizer
from hybridflow.engines.contract import Row
from hybridflow.engines.vllm.requirements import check_response
from hybridflow.engines.vllm.row_images import RowImages, check_columns
from hybridflow.environments.agent import AGENT_SETTINGS, ActingSession, Agent, report_failures
from hybridflow.environments.sessions import RecentProcesses
from hybridflow.environments.trajectory import (
    AGENT_COLUMNS,
    REWARD_COLUMNS,
    Acted,
    TrajectoryRow,
    trajectory_columns,
    trajectory_rows,
)
from hybridflow.errors import ConfigError, DivergenceError, PromptError
from hybridflow.models.hf_spec import image_tokens, read_spec
from hybridflow.models.images import GRIDS, IMAGES, PIXELS
from hybridflow.protocols.operation import Settings, register
from hybridflow.protocols.protocol import THREE_D_ALL_MICRO_DP
from hybridflow.settings import require

if TYPE_CHECKING:
    from hybridflow.engines.vllm.engine import VLLMEngine

_AGENTS = 2
"""Whose processes stay between calls, so that training and evaluation may take turns."""
_SESSION = ("batch", "solve", "until", "rows", "replica", "version")
"""Settings of `run` and `advance_rows` that are not those of the sampling."""
WRITTEN = ("prompt_ids", "response_ids", "log_probs", "policy_version", "response_mask", "num_tokens", "finished")
WRITTEN += ("temperature",)
SESSION_ROWS = ("row_id", "response_index", "oldest_version", "newest_version", "spans", "recomputed_tokens")
SESSION_ROWS += ("response_tokens",)


def _bound(settings: Settings, call: Settings) -> Settings:
    """The call's `sampling` and `agent` (or None) as values, in place of the settings that they are made of."""
    if (own := settings["generate"]) is None:
        raise ConfigError("this actor does not generate: give ActorWorker.on(..., generate=hf.VLLM(...)).")
    batch, n = call.get("batch"), call.get("n")
    if isinstance(batch, BatchRef) and n is not None and type(n) is not int:
        counts = batch.get(n)[n] if isinstance(n, str) else n
        call = {**call, "batch": batch.repeat(counts), "n": 1}
    bound = _values(own, call)
    if isinstance(batch, BatchRef) and bound["sampling"].seed is not None:
        return {**bound, "batch": bound["batch"].apart()}
    return bound


def _as_values(strategy: VLLM, call: Settings) -> Settings:
    """On a host, where another method of the worker may have called."""
    return call if "agent" in call else _values(strategy, call)


def _values(strategy: VLLM, call: Settings) -> Settings:
    others = {name: value for name, value in call.items() if name not in (*_SESSION, *AGENT_SETTINGS)}
    kept = {name: value for name, value in call.items() if name in _SESSION}
    return kept | {"sampling": replace(strategy.sampling, **others), "agent": Agent.of(call)}


def _check(settings: Settings, call: Settings) -> None:
    most, strategy = call["sampling"].max_tokens, settings["generate"]
    here = (Path(settings["model"]) / "config.json").is_file()  # a trace may have a model's name only
    if most != strategy.sampling.max_tokens and here:
        check_response(read_spec(settings["model"], "lm"), strategy, most)
    batch = call["batch"]
    if isinstance(batch, BatchRef) and not {PIXELS, GRIDS}.isdisjoint(batch.columns):
        check_columns(batch.rows, read_spec(settings["model"], "lm"))
    texts = isinstance(batch, BatchRef) and "prompt" in batch and "prompt_ids" not in batch
    if texts and not has_tokenizer(settings["model"]):
        raise PromptError(
            f"prompts are text and {settings['model']} has no tokenizer. Give prompt_ids, or add a tokenizer."
        )
    if (agent := call["agent"]) is not None and isinstance(batch, BatchRef):
        agent.check(str(settings["model"]), batch.columns)


def _written(settings: Settings, agent: Agent | None) -> tuple[str, ...]:
    written = (*WRITTEN, "response") if has_tokenizer(settings["model"]) else WRITTEN
    if settings["generate"].return_routed_experts:
        written = (*written, "routed_experts")
    if agent is None:
        return written
    if image_tokens(settings["model"]) is not None:
        written = (*written, PIXELS, GRIDS)
    return (*written, *AGENT_COLUMNS, *(REWARD_COLUMNS if agent.rewards else ()))


def _writes(settings: Settings, call: Settings) -> tuple[str, ...]:
    written = _written(settings, agent := call["agent"])
    return written if agent is None else tuple(dict.fromkeys((*call["batch"].columns, *written)))


generates = register(
    THREE_D_ALL_MICRO_DP,
    binds=_bound,
    reads=lambda settings, call: ("prompt_ids|prompt", "row_id?", *IMAGES) if call["agent"] is None else None,
    writes=_writes,
    repeat=lambda settings, call: call["sampling"].n,
    carries=True,
    resizes=lambda settings, call: call["agent"] is not None,
    check=_check,
)
"""Declares `generate_sequences` and `run` of a worker whose settings are `model` and `generate`."""


class Generation:
    """One rank's generation engine, its checkpoint's tokenizer and its strategy's defaults.

    `engine` may be replaced by another of the same model; it is closed when the tokenizer cannot be read.
    """

    def __init__(self, engine: VLLMEngine, strategy: VLLM, checkpoint: str | os.PathLike[str]) -> None:
        self.engine, self.strategy = engine, strategy
        self.outdated = False  # the version of the weights, which `advance` names
        self._named = False
        self._checkpoint = str(checkpoint)
        self._processes = RecentProcesses(_AGENTS)
        self._numbers = count(1 << 40)  # of trajectories; calls of `generate` count rows from -1 down
        self._acting = ActingSession(engine, self._checkpoint, self._numbers)
        try:
            self.tokenizer = load_tokenizer(checkpoint) if has_tokenizer(checkpoint) else None
            if self.tokenizer is not None:
                engine.restrict(self.tokenizer.size)
        except BaseException:
            engine.close()
            raise

    def responses(self, batch: Batch, sampling: Sampling) -> Batch:
        """`n` responses per prompt of `batch`, as the columns of `generate_sequences`.

        A row's random numbers depend on the seed of `sampling` and its `row_id`, not on the split.
        """
        row_ids = _row_ids(batch)
        prompts, images = self._prompt_ids(batch), RowImages.of(batch)
        drawn = self.engine.generate(prompts, sampling, _seeds(sampling, row_ids), row_ids, images)
        return self._columns([row for several in drawn for row in several])

    def trajectories(self, batch: Batch, agent: Agent, sampling: Sampling) -> Batch | None:
        """`n` trajectories per row of `batch`, see `RowSession.run`; None on ranks whose output is not collected."""
        row_ids = _row_ids(batch) or list(range(batch.rows))
        seeds, (images, batch) = _seeds(sampling, row_ids), RowImages.taken(batch)
        begun = self.engine.new_rows([[]] * batch.rows, sampling, seeds, row_ids, images)
        if not self.engine.is_first:
            self.engine.serve(None)
            return None
        turns = agent.sessions(self._checkpoint, self._processes, self._numbers)
        turns.start(begun, [row for row in batch.to_dicts() for _ in range(sampling.n)])
        try:
            self.engine.serve(turns)
        except BaseException:
            self._processes.close()  # its trajectories would go on in the next call
            raise
        acted = turns.take()
        report_failures(acted, agent)
        own, several = self.trajectory_batch(acted, sampling.n, agent)
        carried = batch[torch.tensor([at // sampling.n for at, rows in enumerate(several) for _ in rows])]
        return carried.with_columns(**{name: own[name] for name in own.columns})

    def trajectory_batch(
        self, acted: Sequence[Acted], n: int, agent: Agent
    ) -> tuple[Batch, list[list[tuple[Row, TrajectoryRow]]]]:
        """The rows of trajectories, without the columns of their prompts."""
        several = trajectory_rows(acted, end_token_ids(self._checkpoint)[:1] or (0,))
        columns = trajectory_columns(acted, several, n, agent.rewards)
        found = self._columns([row for rows in several for row, _ in rows])
        finite, mask = (token_column(one, "response_mask") for one in (found, columns))
        if (tokens := image_tokens(self._checkpoint)) is not None:
            found |= RowImages.columns([row.images for rows in several for row, _ in rows], tokens.patch)
        return columns | found | {"response_mask": mask.with_values(mask.values & finite.values)}, several

    def close(self) -> None:
        """Free the engine and end the processes of agents. May be called twice."""
        self._processes.close()
        self._acting.close()
        self.engine.close()

    def advance(
        self,
        batch: Batch | None,
        until: Until,
        rows: Sequence[Mapping[str, Any]],
        version: int | None,
        sampling: Sampling,
        agent: Agent | None,
    ) -> Batch | None:
        """The rows that finish, see `RowSession.advance_rows`."""
        engine = self.engine
        given = [Row(**row) for row in rows]
        if batch is not None:
            row_ids, prompts = _row_ids(batch), [[]] * batch.rows if agent else self._prompt_ids(batch)
            images, batch = RowImages.taken(batch)
            given += engine.new_rows(prompts, sampling, _seeds(sampling, row_ids), row_ids, images)
        self._acting.check(agent)
        if agent is None:
            engine.submit(given)
        elif batch is not None:
            self._acting.start(agent, given, batch, sampling.n)
        if version is not None:
            engine.policy_version = version
            self.outdated, self._named = False, True
        if agent is not None:
            if (acted := self._acting.advance(until)) is None:
                return None
            own, several = self.trajectory_batch(acted, sampling.n, agent)  # `row_id` is that of `run`
            return with_session(own, trajectory_session(acted, several)).with_columns(row_id=own["row_id"])
        engine.advance(until)
        taken = engine.take()
        return with_session(self._columns(taken), [(row, row.policy_version, len(row.token_ids)) for row in taken])

    @property
    def unfinished(self) -> bool:
        """Whether the session has rows or trajectories under way; equal on all ranks of the replica."""
        return bool(self.engine.unfinished) or self._acting.under_way > 0

    def advance_while(self, going: Callable[[], bool]) -> None:
        """Go on with them as long as `going()` on the replica's first rank, and for a moment more."""
        if self._acting.under_way:
            self._acting.advance_while(going)
        else:
            self.engine.advance_while(going)

    def withdraw(self, row_ids: Sequence[int] | None, keep: bool) -> list[dict[str, Any]]:
        """See `RowSession.withdraw_rows`."""
        found = [row for row in self.session_rows if row_ids is None or row.row_id in row_ids]
        gone = found if keep else self.engine.withdraw([row.name for row in found])
        rows = [{"row_id": row.row_id, "index": row.index} if row.images else asdict(row) for row in gone]
        return rows + self._acting.withdraw(row_ids, keep)

    @property
    def session_rows(self) -> list[Row]:
        """The unfinished rows that are no turns of trajectories."""
        return [row for row in self.engine.unfinished if row.row_id >= 0]

    def weights_changed(self) -> None:
        """Other weights have been written."""
        self.engine.weights_changed()
        self.outdated = self._named

    def _prompt_ids(self, batch: Batch) -> list[list[int]]:
        if "prompt_ids" in batch:
            return token_column(batch, "prompt_ids").tolist()
        assert self.tokenizer is not None  # checked on the driver
        return self.tokenizer.encode(batch["prompt"])

    def _columns(self, rows: Sequence[Row]) -> Batch:
        """WRITTEN, `routed_experts` where they are captured, and `response` with a tokenizer. `response_mask` leaves
        out tokens whose log-probability is not finite. Errors: DivergenceError when that of no token is.
        """
        response_ids = Ragged.from_rows([row.token_ids for row in rows], torch.int64)
        log_probs = Ragged.from_rows([row.log_probs for row in rows], torch.float32)
        temperatures = [row.sampling.policy_temperature for row in rows]
        finite = log_probs.values.isfinite()
        # 0: not the model's, of an agent
        if not (bool(finite.all()) or bool((finite & (log_probs.values != 0)).any())):
            raise DivergenceError(
                f"generation has sampled {int((~finite).sum())} tokens, and the log-probability of each is not finite: "
                f"weights that it was given are nan or infinite, or the model overflows in its dtype "
                f"(hf.VLLM(dtype=...)). Load weights from before that, see hf.Checkpoints."
            )
        columns: dict[str, Any] = {
            "prompt_ids": Ragged.from_rows([row.prompt_ids for row in rows], torch.int64),
            "response_ids": response_ids,
            "log_probs": log_probs,
            "policy_version": Ragged.from_rows([row.policy_version for row in rows], torch.int32),
            "response_mask": log_probs.map(torch.isfinite),
            "num_tokens": torch.tensor([len(row.prompt_ids) + len(row.token_ids) for row in rows], dtype=torch.int64),
            "finished": torch.tensor([row.finished for row in rows], dtype=torch.bool),
            "temperature": torch.tensor(temperatures, dtype=torch.float32),
        }
        if (nothing := self.engine.no_routing) is not None:
            found = [nothing if row.routed_experts is None else row.routed_experts for row in rows]
            columns["routed_experts"] = Ragged.from_lengths(torch.cat([nothing, *found]), [len(one) for one in found])
        if (tokenizer := self.tokenizer) is not None:
            skips = [row.sampling.skip_special_tokens for row in rows]
            texts = {skip: tokenizer.decode([row.token_ids for row in rows], not skip) for skip in {*skips}}
            columns["response"] = [texts[skip][at] for at, skip in enumerate(skips)]
        return Batch(columns)


def _row_ids(batch: Batch) -> list[int] | None:
    return row_column(batch, "row_id").tolist() if "row_id" in batch else None


def _seeds(sampling: Sampling, row_ids: Sequence[int] | None) -> list[int] | None:
    """One per prompt."""
    if sampling.seed is None or row_ids is None:
        return None
    return [sampling.seed * 1_000_003 + row_id for row_id in row_ids]


def with_session(columns: Batch, rows: Iterable[tuple[Row, Sequence[int], int]]) -> Batch:
    """Adds SESSION_ROWS: of each row its name and counters, the versions of its tokens (none: 0 and -1), its tokens."""
    numbers = [
        (row.row_id, row.index, min(versions, default=0), max(versions, default=-1), row.spans, row.recomputed, tokens)
        for row, versions, tokens in rows
    ]
    more = torch.tensor(numbers, dtype=torch.int64).reshape(-1, len(SESSION_ROWS)).unbind(1)
    return columns.with_columns(**dict(zip(SESSION_ROWS, more, strict=True)))


def trajectory_session(
    acted: Sequence[Acted], several: Sequence[Sequence[tuple[Row, TrajectoryRow]]]
) -> list[tuple[Row, list[int], int]]:
    """For `with_session`: the versions are those of the whole trajectory, its counters are in the first of its rows."""
    out = []
    for one, rows in zip(acted, several, strict=True):
        versions = [version for row, _ in rows for version in row.policy_version if version >= 0]
        for at, (row, _) in enumerate(rows):
            out.append((row if at else one.begun, versions, len(row.token_ids)))
    return out


def _check_session(settings: Settings, call: Settings) -> None:
    require(
        isinstance(call["until"], Until) and call["until"] != Until(),
        f"advance_rows(until={call['until']!r}): give when the call ends, such as hf.Until(steps=16) or (seconds=1.0).",
    )
    if call["agent"] is not None:
        require(
            call["until"].steps is None,
            "advance_rows(until=hf.Until(steps=...)) with an agent: it may wait for a tool between two steps. Give "
            "rows= (trajectories), groups= or seconds=.",
        )
        require(
            not call["rows"],
            "advance_rows(rows=...) with an agent: trajectories begin anew. Submit their prompts again.",
        )
    given = call["batch"]
    require(
        given is None or "row_id" in given,
        "advance_rows names rows by 'row_id', which this batch lacks. Prompts of hf.PromptLoader have it.",
    )
    require(
        not call["rows"] or call["replica"] is not None,
        "advance_rows(rows=...) without replica=: every replica would continue all of them. Give each its own.",
    )
    _check(settings, call)


class RowSession:
    """Generation that lives across calls, of a worker with a generation engine: each replica holds unfinished rows.

    The calls of one replica run in the order of all calls of its hosts, so weights may arrive between two of them.
    """

    generation: Generation | None = None

    @abstractmethod
    def generating(self, alone: bool = False) -> AbstractContextManager[Generation]:
        """Weights and KV cache are in memory inside the block. `alone`: only the ranks of one replica are called."""

    @property
    def rollout(self) -> Generation:
        """The generation engine, as it is."""
        assert self.generation is not None  # checked on the driver
        return self.generation

    @generates
    def generate_sequences(self, batch: Batch, **sampling: Any) -> Batch | None:
        """`n` responses per prompt; input columns are returned too, each row n times.

        Reads `prompt_ids` (ragged int64), or `prompt` (text, tokenised here). Writes `prompt_ids`, `response_ids`
        ragged int64, `log_probs` ragged [B, R] float32 of the sampling policy after temperature, `policy_version`
        ragged [B, R] int32 of the weights that sampled each token, `response_mask` ragged [B, R] bool, `num_tokens` [B]
        int64 (prompt + response), `finished` [B] bool (not truncated), `temperature` [B] float32 (training divides its
        logits by it) and, with a tokenizer, `response` (text). `sampling` overrides the `Sampling` of the `VLLM`
        strategy for this call, e.g. `greedy=True`; `n` may also be a list with a number for each prompt, or the name of
        a column that has them. A response ends, unfinished, when prompt and response fill the
        context (or `max_length`), even before `max_tokens`. With `VLLM(return_routed_experts=True)` there is also
        `routed_experts` ragged [B, prompt + R - 1, layers with experts, experts of a token] uint8 (int16 for more than
        256 experts): those that each token but the last was computed with.

        With `tools=[function, ...]` the model calls functions, with `environment=Class` it acts in an environment, for
        at most `max_turns` turns (docs/environments.md has the further settings). Each trajectory is a row, or several
        where its prefix changes; further columns are `trajectory_id`, `group_id`,
        `turns`, `tool_calls`, `tool_errors`, `prefill_tokens` [B] int64, `turn_ids` ragged [B, R] int64 (-1: not the
        model's), `stop` and `environment_failure` (text or None) and, of environments, `rewards` and
        `rewards/environment` [B] float32. The driver then waits for the call.

        Errors: PromptError for a prompt that is empty or leaves no room for a response, ConfigError; RewardError for
        environments that fail, with on_failure="raise".
        """
        return self.acting(batch, **sampling)

    @register(
        THREE_D_ALL_MICRO_DP,
        binds=_bound,
        reads=lambda settings, call: ("prompt_ids|prompt", "row_id", *IMAGES) if call["agent"] is None else None,
        writes=lambda settings, call: tuple(dict.fromkeys((*_written(settings, call["agent"]), *SESSION_ROWS))),
        resizes=True,
        later=True,
        replica="replica",
        check=_check_session,
    )
    def advance_rows(
        self,
        batch: Batch | None = None,
        *,
        until: Until,
        rows: Sequence[Mapping[str, Any]] = (),
        replica: int | None = None,
        version: int | None = None,
        **sampling: Any,
    ) -> Batch | None:
        """Submit `n` rows per prompt of `batch`, and `rows` as `withdraw_rows` returned them; decode until `until`.

        Runs on generation replica `replica` only; None: on all of them, which share the rows of `batch`, and each
        decodes until `until`. An actor's weights move to generation on all ranks: the first call after training needs
        None. `version` is the policy version of the present weights (default: counted by the engine).

        The finished rows, in the order in which they finished, have the columns of `generate_sequences`, and `row_id`,
        `response_index` (0..n-1), `oldest_version` and `newest_version` of its tokens, `spans` and `recomputed_tokens`
        (see `Row`), `response_tokens`, all [B] int64.

        With `tools`, `environment` or `solve`, here and in all calls until their trajectories have ended, each prompt
        gets `n` trajectories, and a row of `until` is a trajectory. The rows of those that have ended have the columns
        that `generate_sequences(environment=...)` adds; versions are those of the whole trajectory.

        Errors: as `generate_sequences`; ConfigError for a row that the replica has already. No row of a failed call is
        lost: what it had submitted before can be withdrawn.
        """
        with self.generating(alone=replica is not None) as generation:
            asked = _as_values(generation.strategy, sampling)
            return generation.advance(batch, until, rows, version, asked["sampling"], asked["agent"])

    @generates
    def run(self, batch: Batch, solve: Callable[..., Any], **options: Any) -> Batch | None:
        """`n` trajectories per row of `batch` by an agent of the user's own, `async def solve(row, model)`.

        `row` has the row's columns, `model` is a `Conversation`: `await model.chat(messages, tools=...)`, `await
        model.generate(ids)`. What it returns is the reward: a number, {"reward": number, figure: number, ...} or None.
        `options` are those of the sampling, whose `max_tokens` counts for each turn, and `workers`, `concurrency`,
        `timeout`, `on_failure` and `chat_template_kwargs`, see docs/environments.md.

        The columns are those of `generate_sequences(environment=...)`. The driver waits, because only the call knows
        how many rows its trajectories have.

        Errors: as `generate_sequences`; RewardError with on_failure="raise", and for an agent that cannot be loaded in
        a process of its own.
        """
        return self.acting(batch, solve=solve, **options)

    def acting(self, batch: Batch, **call: Any) -> Batch | None:
        """Plain responses, or the trajectories of the agent of a call with these settings."""
        with self.generating() as generation:
            asked = _as_values(generation.strategy, call)
            if (agent := asked["agent"]) is None:
                return generation.responses(batch, asked["sampling"])
            return generation.trajectories(batch, agent, asked["sampling"])

    @register(THREE_D_ALL_MICRO_DP, replica="replica")
    def row_tokens(self, replica: int | None = None) -> list[tuple[int, int, int]]:
        """Row id, tokens of the prompt and of the response so far, for each unfinished row of a generation replica."""
        del replica  # used by the driver only
        return [(row.row_id, len(row.prompt_ids), len(row.token_ids)) for row in self.rollout.session_rows]

    @register(THREE_D_ALL_MICRO_DP, replica="replica")
    def withdraw_rows(
        self, replica: int | None = None, keep: bool = False, row_ids: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """The unfinished rows (of the prompts `row_ids`) of a generation replica as plain data. None: a list of them
        for each replica.

        The replica forgets them, unless `keep`: a snapshot, for a checkpoint or for the loss of a host. Of trajectories
        and of rows with images there are `row_id` and `index` only: they begin anew. Without `row_ids`, trajectories
        that ended and were not returned are forgotten, too.
        """
        del replica  # used by the driver only
        found = self.rollout.withdraw(row_ids, keep)
        self.rows_withdrawn()
        return found

    def rows_withdrawn(self) -> None:
        """Called when rows have left: others may need the memory."""
