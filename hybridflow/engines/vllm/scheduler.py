"""vLLM's scheduler with a short path for most steps of generation: all requests decode one token, and none waits.

vLLM's own path asks of every request in every step what only servers need (encoders, speculation, transfers of the
cache), which takes longer than a small model's layers. Decisions are the same: a step with anything else to decide is
vLLM's.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request


class DecodeScheduler(Scheduler):
    """Schedules requests of `RequestMaker` on one pipeline stage, without statistics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        plain = [type(manager) for manager in managers] == [FullAttentionManager]
        self._plain_cache = plain and self.hash_block_size == self.block_size
        self._decoding: tuple[SchedulerOutput, list[Request]] | None = None  # the step under way, if it is short

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._decoding = None
        if (edges := self._edges()) is None:
            return super().schedule(throttle_prefills)
        self.current_step += 1
        fresh = {}
        for request in edges:
            blocks = self.kv_cache_manager.allocate_slots(request, 1)
            assert blocks is not None, "there were enough free blocks"
            fresh[request.request_id] = blocks.get_block_ids(allow_none=True)
        running = list(self.running)
        ids = [request.request_id for request in running]
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=ids,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[fresh.get(name) for name in ids] if fresh else [None] * len(ids),
                num_computed_tokens=[request.num_computed_tokens for request in running],
                num_output_tokens=[len(request._output_token_ids) for request in running],
            ),
            num_scheduled_tokens=dict.fromkeys(ids, 1),
            total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=set(),
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )
        for request in running:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
        self.prev_step_scheduled_req_ids = set(ids)
        self.finished_req_ids = set()
        self._decoding = output, running
        return output

    def _edges(self) -> list[Request] | None:
        """The requests that come to an edge of their cache blocks in this step; None if it is not a short one."""
        running, size = self.running, self.block_size
        if (
            not self._plain_cache
            or not running
            or (self.waiting and len(running) + self.num_waiting_for_streaming_input < self.max_num_active_reqs)
            or len(self.kv_holding_waiting) > self.num_waiting_for_streaming_input
            or self.reset_preempted_req_ids
            or self._pause_state != PauseState.UNPAUSED
            or len(running) > self.max_num_scheduled_tokens
        ):
            return None
        before, edges = self.prev_step_scheduled_req_ids, []
        for request in running:
            computed = request.num_computed_tokens
            if len(request._all_token_ids) != computed + 1 or request.request_id not in before:
                return None
            if (
                computed % size == 0 or (computed + 1) % size == 0
            ):  # a block begins, or is complete for the prefix cache
                edges.append(request)
        return edges if len(edges) <= self.kv_cache_manager.block_pool.get_num_free_blocks() else None

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self._decoding is None or self._decoding[0] is not scheduler_output:
            return super().update_from_output(scheduler_output, model_runner_output)
        places, token_ids = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        log_probs, length = model_runner_output.logprobs, self.max_model_len
        outputs, stopped = list[EngineCoreOutput](), set[Request]()
        for request in self._decoding[1]:
            place, name, reason = places[request.request_id], request.request_id, None
            request.num_in_flight_tokens -= 1
            request.append_output_token_ids(token_ids[place][0])
            if check_stop(request, length):
                reason = request.get_finished_reason()
                if self._handle_stopped_request(request):  # or it waits for what continues it
                    self._free_request(request)
                stopped.add(request)
            found = log_probs.slice_request(place, 1) if log_probs is not None else None
            outputs.append(
                EngineCoreOutput(name, token_ids[place], found, finish_reason=reason, stop_reason=request.stop_reason)
            )
        if stopped:
            self.running = [request for request in self.running if request not in stopped]
        return {0: EngineCoreOutputs(outputs=outputs)}
