"""The engine loop: rows become vLLM's requests, and its core is stepped until enough of them have finished.

    submit -> unfinished rows -> advance: admit, step, step, ... -> finished rows -> take
                    |  ^                    |
            withdraw   evict (new weights, sleep, an error): admitted again by the next advance

A row is the whole state of its response. What vLLM has of it (a request, KV cache) can be dropped at any time between
two steps and is computed again from its tokens.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.config import Sampling, Until
from hybridflow.data.tokenizer import Tokenizer, end_token_ids, has_tokenizer, load_tokenizer
from hybridflow.engines.contract import Row
from hybridflow.engines.vllm.isolation import batch_invariant
from hybridflow.engines.vllm.routed_experts import RoutedExperts
from hybridflow.engines.vllm.row_images import features
from hybridflow.errors import ConfigError
from hybridflow.models.images import ImageTokens

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

_MOST_STEPS = 64  # between two looks at the clock
MOMENT = 0.05  # seconds


class EngineLoop:
    """The rows of one rank. All ranks of a replica make the same calls, and the same steps in each.

    `agreed(number)` is the number of the replica's first rank, collective over the replica. `runner` runs the model.
    With `keeps`, rows keep their KV cache when weights change. Requests have a salt, so that a row finds no
    blocks of the prefix cache that are older than the latest `rest`. A row cannot be longer than `max_length` tokens of
    prompt and response. `routing`, when given, captures the experts of finished rows.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: Any,
        requests: RequestMaker,
        agreed: Callable[[int], int],
        max_length: int,
        keeps: bool,
        routing: RoutedExperts | None = None,
    ) -> None:
        self._routing = routing
        self._core, self._requests, self._agreed = core, requests, agreed
        self._max_length, self._keeps = max_length, keeps
        self._runner, self._sampler = runner, runner.sampler
        self._scheduler: Any = core.scheduler
        self._held = HeldCaches(core)
        self.policy_version = -1  # vLLM starts with random weights
        self._changes = 0
        self.rows: dict[str, Row] = {}  # unfinished
        self._finished: dict[str, Row] = {}
        self._admitted: dict[str, IncrementalDetokenizer | None] = {}  # in vLLM's scheduler
        self._open: Counter[int] = Counter()  # unfinished rows of each prompt

    def restrict(self, tokens: int) -> None:
        """See `VLLMEngine.restrict`."""
        self._sampler.known = max(tokens, *(number + 1 for number in self._requests.stop_ids), 0)

    def submit(self, rows: Sequence[Row]) -> None:
        """Errors: ConfigError for a row that is finished or that the engine has already; then none is taken up."""
        names = Counter(row.name for row in rows)
        for row in rows:
            if names[row.name] > 1 or row.name in self.rows or row.name in self._finished:
                raise ConfigError(
                    f"row {row.name} was submitted twice: take() or withdraw() it first, or give its prompt another "
                    "row_id."
                )
            if row.end or not len(row.token_ids) == len(row.log_probs) == len(row.policy_version):
                raise ConfigError(
                    f"row {row.name} is {'finished' if row.end else 'damaged'}: it has {len(row.token_ids)} tokens, "
                    f"{len(row.log_probs)} log-probabilities, {len(row.policy_version)} versions and end={row.end!r}. "
                    "Submit unfinished rows as withdraw() returned them."
                )
            self._requests.check(row)
        for given in rows:
            row = replace(
                given,
                token_ids=list(given.token_ids),
                log_probs=list(given.log_probs),
                policy_version=list(given.policy_version),
            )
            self.rows[row.name] = row
            self._open[row.row_id] += 1
            length = len(row.token_ids)
            if length >= row.sampling.longest or len(row.prompt_ids) + length >= self._max_length:
                self._finish(row, "length")

    def advance(self, until: Until) -> None:
        def reached() -> bool:
            return (until.rows is not None and len(self._finished) >= until.rows) or (
                until.groups is not None and self._groups() >= until.groups
            )

        self.run(reached, until.steps, until.seconds)

    def advance_while(self, going: Callable[[], bool]) -> None:
        """`going()` of the first rank counts; it must not raise."""
        while self.rows and self._agreed(int(going())):
            self.run(lambda: False, seconds=MOMENT)

    def run(self, reached: Callable[[], bool], steps: int | None = None, seconds: float | None = None) -> None:
        """Step until no row is unfinished, `reached()`, or `steps` or `seconds` have passed.

        After an error no row is in vLLM's scheduler; all can be withdrawn, with the tokens that they have.
        """
        start, made, checked = time.monotonic(), 0, 0
        try:
            with batch_invariant(self._runner.device):
                self._admit()
                while self.rows and not reached() and (steps is None or made < steps):
                    if seconds is not None and made == checked:
                        if (ahead := self._agreed(_steps_ahead(seconds, time.monotonic() - start, made))) < 1:
                            break
                        checked += ahead
                    self._step()
                    made += 1
                while any(scheduled.total_num_scheduled_tokens for _, scheduled, _ in self._core.batch_queue or ()):
                    self._step(schedule=False)
        except BaseException:
            self.evict()
            raise

    def take(self, names: Collection[str] | None = None) -> list[Row]:
        """Finished rows, in the order in which they finished; all, or those of `names`."""
        return [self._finished.pop(name) for name in list(self._finished) if names is None or name in names]

    def withdraw(self, names: Collection[str] | None = None) -> list[Row]:
        out = [row for name, row in self.rows.items() if names is None or name in names]
        self._release([row.name for row in out])
        for row in out:
            del self.rows[row.name]
            self._open -= Counter([row.row_id])
        return out

    def evict(self) -> None:
        """Take all rows out of vLLM's scheduler; they stay unfinished, and their KV cache is free."""
        self._release(list(self._admitted))
        self._held.release()

    def drop(self, names: Collection[str] | None = None) -> None:
        """Free the KV cache of finished rows (with these names) that are `kept`: nothing will continue them."""
        self._held.release(names)

    def weights_changed(self, version: int | None) -> None:
        """Other weights have been written; rows continue with them. `version`: theirs, by default the next."""
        self.policy_version = self.policy_version + 1 if version is None else version
        self.rest(() if self._keeps else self.admitted)

    @property
    def admitted(self) -> list[str]:
        """The rows that vLLM's scheduler has."""
        return list(self._admitted)

    def cached(self) -> dict[str, int]:
        """Tokens of the rows that have keys and values in the cache."""
        tokens = {name: self._scheduler.requests[name].num_computed_tokens for name in self._admitted}
        return {name: count for name, count in tokens.items() if count}

    def blocks(self, names: Iterable[str]) -> list[int]:
        """Blocks of the cache that these rows use."""
        manager = self._scheduler.kv_cache_manager
        found = {block for name in names for group in manager.get_block_ids(name) for block in group}
        return sorted(found - {manager.block_pool.null_block.block_id})

    def rest(self, gone: Iterable[str]) -> None:
        """Free the KV cache, of these rows too; the other admitted rows keep theirs, which no row will share. Images
        that are read from now on are encoded anew."""
        self._release(list(gone))
        self._held.release()
        self._changes += 1
        for name in self._admitted:
            self._scheduler.requests[name].skip_reading_prefix_cache = True
        self._scheduler.reset_encoder_cache()
        self._core.model_executor.reset_encoder_cache()
        if not self._admitted:
            done = self._core.reset_prefix_cache()
            assert done, "blocks of the KV cache belong to no row"

    def close(self) -> None:
        """Drop vLLM's engine core; the rows stay."""
        del self._core, self._runner, self._sampler, self._scheduler, self._held, self._routing

    def _admit(self) -> None:
        """Hand the rows that vLLM does not have to its scheduler."""
        for name, row in self.rows.items():
            if name in self._admitted:
                continue
            cached, core = self._held.cached(row), self._core
            request = self._requests.request(row, f"{self._changes}", cached, self._held.possible)
            self._sampler.streams[name] = (row.seed, len(row.prompt_ids))
            if (edits := self._requests.edits(row.sampling)) is not None:
                self._sampler.edits[name] = edits
            self._admitted[name] = self._requests.watch(row)
            core.add_request(*core.preprocess_add_request(request))
            row.recomputed += len(row.prompt_ids) + len(row.token_ids) if row.spans else 0
            row.spans += 1
            row.prefilled += len(row.prompt_ids) - cached if cached else 0  # vLLM counts that of others

    def _step(self, schedule: bool = True) -> None:
        """One step of vLLM's core; `schedule=False` only completes one that is in flight."""
        from vllm.v1.core.sched.interface import PauseState

        core, ended, stopped = self._core, list[Row](), []
        self._held.make_room()
        if not schedule:
            self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            outputs, executed = core.step_fn()
        finally:
            if not schedule:
                self._scheduler.set_pause_state(PauseState.UNPAUSED)
        core.post_step(executed)
        for output in outputs[0].outputs if outputs else ():  # pipelines are filled first
            if output.request_id in self._admitted and self._take_output(output):
                running, row = output.finish_reason is None, self._finished[output.request_id]
                ended.append(row)
                if not (row.kept and self._held.hold(row, running)) and running:
                    stopped.append(row.name)
        if self._routing is not None:
            self._routing.finish(ended)
        if stopped:
            core.abort_requests(stopped)
        if not executed:  # nothing had room
            self._held.release()

    def _take_output(self, output: EngineCoreOutput) -> bool:
        """Add the tokens of one step to their row; True when it is finished."""
        row, reason = self.rows[output.request_id], output.finish_reason
        row.token_ids += output.new_token_ids
        row.policy_version += [self.policy_version] * len(output.new_token_ids)
        if output.new_logprobs is not None:
            row.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
        if output.prefill_stats is not None:
            row.prefilled += output.prefill_stats.num_computed_tokens
        watch = self._admitted[row.name]
        stopped = watch is not None and watch.update(output.new_token_ids, False) is not None
        if not stopped and reason is None:
            return False
        self._forget([row.name])
        self._finish(row, "stop" if stopped or str(reason) == "stop" else "length")
        return True

    def _finish(self, row: Row, end: Any) -> None:
        row.end = end
        self._finished[row.name] = self.rows.pop(row.name)
        self._open -= Counter([row.row_id])

    def _groups(self) -> int:
        """The number of prompts of which all rows are finished."""
        return len({row.row_id for row in self._finished.values()} - self._open.keys())

    def _release(self, names: Sequence[str]) -> None:
        self._core.abort_requests([name for name in names if name in self._admitted])
        self._forget(names)
        if self._routing is not None:
            self._routing.forget(names)

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            self._admitted.pop(name, None)
            self._sampler.forget(name)


def _steps_ahead(seconds: float, passed: float, made: int) -> int:
    """Steps to make before the next look at the clock: half of what fits, by the steps made so far."""
    if passed >= seconds:
        return 0
    fitting = (seconds - passed) / 2 * made / passed if passed else 1.0
    return int(max(1.0, min(_MOST_STEPS, fitting)))


class HeldCaches:
    """Requests of `core` that have ended and wait for a next turn, the oldest first: the KV cache of each stays for the
    row of its name that continues it. All ranks of a replica make the same calls.

    vLLM's prefix cache knows whole blocks (128 tokens on CPU). A request that waits for more input, as of its streaming
    sessions, keeps all of its blocks, so the next turn of a conversation computes its new tokens only.
    Where steps overlap (pipelines, and asynchronous scheduling on CUDA) none is held: the prefix cache remains.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core, self._scheduler = core, core.scheduler
        self.possible = core.batch_queue is None
        self._ids: dict[str, list[int]] = {}  # prompt and response

    def hold(self, row: Row, running: bool) -> bool:
        """Keep the cache of a row that has ended: vLLM's request waits already, or is `running` and is made to.

        False if it must be aborted.
        """
        from vllm.v1.request import RequestStatus

        if not self.possible:
            return False
        if running:
            scheduler: Any = self._scheduler
            request = scheduler.requests[row.name]
            if request.status != RequestStatus.RUNNING:
                return False
            scheduler.running.remove(request)
            request.status = RequestStatus.FINISHED_STOPPED
            scheduler._handle_stopped_request(request)
        self._ids[row.name] = row.prompt_ids + row.token_ids
        return True

    def cached(self, row: Row) -> int:
        """Tokens of the row's prompt that its name's cache has, which is used with this; otherwise it is freed: 0."""
        if (ids := self._ids.get(row.name)) is None:
            return 0
        if row.token_ids or row.images or row.prompt_ids[: len(ids)] != ids:
            self.release([row.name])
            return 0
        del self._ids[row.name]
        return self._scheduler.requests[row.name].num_computed_tokens  # type: ignore[attr-defined]

    def release(self, names: Iterable[str] | None = None) -> None:
        """Free the caches of these names, or all; their whole blocks stay in the prefix cache while there is room."""
        gone = [name for name in (list(self._ids) if names is None else names) if self._ids.pop(name, None) is not None]
        if gone:
            self._core.abort_requests(gone)

    def make_room(self) -> None:
        """Free the oldest while rows have less than half of the cache to themselves, or wait for a place."""
        scheduler: Any = self._scheduler
        while self._ids:
            pool, places = scheduler.kv_cache_manager.block_pool, scheduler.max_num_active_reqs
            full = len(scheduler.running) + scheduler.num_waiting_for_streaming_input >= places
            if 2 * pool.get_num_free_blocks() >= pool.num_gpu_blocks and not (full and scheduler.waiting):
                return
            self.release([next(iter(self._ids))])


class RequestMaker:
    """Makes the requests of rows for a model with the end tokens and the tokenizer of `checkpoint`, which reads
    `images` so."""

    def __init__(self, checkpoint: Path, images: ImageTokens | None = None) -> None:
        self._checkpoint, self._images = checkpoint, images
        self.stop_ids = end_token_ids(checkpoint)
        self._parameters = lru_cache(maxsize=4096)(self._new_parameters)
        self._edits = lru_cache(maxsize=64)(self._new_edits)

    def check(self, row: Row) -> None:
        """Errors: ConfigError for stop strings or bad words without a tokenizer in the checkpoint."""
        asked = "stop" if row.sampling.stop else "bad_words" if row.sampling.bad_words else ""
        if asked and not has_tokenizer(self._checkpoint):
            raise ConfigError(
                f"Sampling({asked}=...) needs a tokenizer to see text, {self._checkpoint} has none. Save one there, or "
                "use stop_token_ids= and logit_bias=."
            )

    def edits(self, sampling: Sampling) -> LogitEdits | None:
        """What the sampler does to the logits of such a row; None: nothing."""
        return self._edits(sampling) if sampling.edits else None

    def _new_edits(self, sampling: Sampling) -> LogitEdits:
        return LogitEdits.of(sampling, load_tokenizer(self._checkpoint) if sampling.bad_words else None)

    def request(self, row: Row, salt: str | None, cached: int = 0, holds: bool = False) -> EngineCoreRequest:
        """The rest of the response, after the prompt and the tokens so far; rows of another `salt` share no cache.

        `cached` tokens are in the cache of the row's name, and with `holds` that of a row that is `kept` stays.
        """
        from vllm.v1.engine import EngineCoreRequest

        left, ids, seen = row.sampling.longest - len(row.token_ids), row.prompt_ids + row.token_ids, row.images
        return EngineCoreRequest(
            request_id=row.name,
            prompt_token_ids=ids[cached:],
            mm_features=features(row.prompt_ids, seen, self._images, salt) if seen and self._images else None,
            sampling_params=self._parameters(row.sampling, left),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
            resumable=row.kept and holds,
        )

    def watch(self, row: Row) -> IncrementalDetokenizer | None:
        """Finds stop strings in a response: `update(new_token_ids, False)` returns a string that was completed or None.

        It has seen the tokens so far. None for a row without stop strings.
        """
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        if not row.sampling.stop:
            return None
        asked = self.request(replace(row, token_ids=[], images=None), None)
        watch = IncrementalDetokenizer.from_new_request(load_tokenizer(self._checkpoint).raw, asked)
        watch.update(row.token_ids, False)
        return watch

    def _new_parameters(self, sampling: Sampling, tokens: int) -> SamplingParams:
        """Parameters of a request for at most `tokens` tokens. Draws take their seeds from `PolicySampler.streams`.

        Stop tokens and stop strings stay in the response: its token ids are exactly what was sampled.
        """
        from vllm import SamplingParams

        out = SamplingParams(
            top_p=1.0 if sampling.greedy else sampling.top_p,
            top_k=0 if sampling.greedy else sampling.top_k,
            max_tokens=tokens,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,  # a stop string may be one
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=[*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.stop_ids)],
            logprobs=0,
        )
        out.temperature = 0.0 if sampling.greedy else sampling.temperature  # vLLM's constructor refuses more than 2
        return out


@dataclass(frozen=True)
class LogitEdits:
    """Bad words, bias, penalties and min_p of a row's draws, as `sampling` asks for them, by the tokens of its prompt
    and its response; `bad_words` are its words as token ids.

    vLLM counts the tokens of a request: of a row that was interrupted, those before would be part of the prompt. Here a
    row has its own prompt, so an interruption changes no draw.
    """

    sampling: Sampling
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def reads(self) -> bool:
        """Whether they depend on the tokens so far."""
        return self.sampling.penalties or bool(self.bad_words)

    @property
    def changes(self) -> bool:
        """Whether `edit` does something."""
        return self.reads or bool(self.sampling.logit_bias)

    @classmethod
    def of(cls, sampling: Sampling, tokenizer: Tokenizer | None) -> LogitEdits:
        """A word is banned where it begins a text and, if it then has as many tokens, after a space, as in vLLM."""
        words: list[tuple[int, ...]] = []
        for word in sampling.bad_words:
            assert tokenizer is not None  # `RequestMaker.check`
            first, spaced = tokenizer.continuations([word.lstrip(), " " + word.lstrip()])
            words.append(tuple(first))
            if spaced[:1] != first[:1] and len(spaced) == len(first):
                words.append(tuple(spaced))
        return cls(sampling, tuple(words))

    def edit(self, logits_V: Tensor, prompt: NDArray[np.int32], response: NDArray[np.int32]) -> None:
        """In place, before the temperature, in vLLM's order: bad words, bias, penalties."""
        for *begun, last in self.bad_words:
            if not begun or response[len(response) - len(begun) :].tolist() == begun:
                logits_V[last] = -torch.inf
        sampling, place = self.sampling, logits_V.device
        if sampling.logit_bias:
            ids, bias = zip(*sampling.logit_bias, strict=True)
            logits_V[torch.tensor(ids, device=place)] += torch.tensor(bias, device=place)
        if sampling.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.union1d(prompt, response).astype(np.int64)).to(place)
            found, penalty = logits_V[seen], sampling.repetition_penalty
            logits_V[seen] = torch.where(found > 0, found / penalty, found * penalty)
        if sampling.frequency_penalty or sampling.presence_penalty:
            ids, counts = np.unique(response, return_counts=True)
            said = torch.from_numpy(ids.astype(np.int64)).to(place)
            amount = sampling.frequency_penalty * torch.from_numpy(counts).to(place) + sampling.presence_penalty
            logits_V[said] -= amount.to(logits_V.dtype)

    def truncate(self, logits_V: Tensor) -> None:
        """In place, after the temperature: tokens below `min_p` of the largest probability are not drawn."""
        if self.sampling.min_p:
            least = logits_V.max() + math.log(self.sampling.min_p)
            logits_V.masked_fill_(logits_V < least, -torch.inf)
