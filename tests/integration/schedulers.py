"""DecodeScheduler beside vLLM's own, in a random life of requests: differences, and how often its path was short."""

from __future__ import annotations

import random
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from hybridflow.engines.vllm.scheduler import DecodeScheduler

BLOCK, BLOCKS, STEPS = 16, 40, 1500  # sixteen requests of up to 64 tokens need 64 blocks: some are preempted
HASHER = get_request_block_hasher(BLOCK, sha256)


def compared(core: Any) -> dict[str, Any]:
    """Steps, short ones among them, preemptions, finished requests, and the first difference ("" where none)."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])
    pair: tuple[Any, ...] = tuple(
        of(
            vllm_config=core.vllm_config,
            kv_cache_config=cache,
            structured_output_manager=core.structured_output_manager,
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=False,
        )
        for of in (DecodeScheduler, Scheduler)
    )
    ours, chance = pair[0], random.Random(3)
    found: dict[str, Any] = {"steps": 0, "short": 0, "preempted": 0, "finished": 0, "difference": ""}
    for step in range(STEPS):
        _change(pair, chance, step)
        plans = [scheduler.schedule() for scheduler in pair]
        found["steps"] += plans[0].total_num_scheduled_tokens > 0
        found["short"] += ours._decoding is not None
        taken = [_answer(scheduler, plan) for scheduler, plan in zip(pair, plans, strict=True)]
        found["finished"] += sum(reason is not None for _, _, reason, _ in taken[0])
        found["preempted"] = sum(request.num_preemptions for request in ours.requests.values()) or found["preempted"]
        states = [(_plain(plan), answer, _state(scheduler)) for plan, answer, scheduler in zip(plans, taken, pair)]
        if states[0] != states[1]:
            found["difference"] = f"step {step}: {states[0]} != {states[1]}"
            break
    return found


def _change(pair: tuple[Any, ...], chance: random.Random, step: int) -> None:
    """New requests, aborted ones, pauses."""
    if chance.random() < 0.15 and len(pair[0].requests) < 24:
        for index in range(chance.randint(1, 6)):
            prompt = [chance.randint(2, 4) for _ in range(chance.randint(1, 40))]
            tokens, name = chance.randint(1, 62 - len(prompt)), f"{step}.{index}"
            for scheduler in pair:
                scheduler.add_request(_request(name, prompt, tokens, resumable=index % 3 == 0))
    waiting = [n for n, one in pair[0].requests.items() if one.status == RequestStatus.WAITING_FOR_STREAMING_REQ]
    for name in sorted(waiting):
        if chance.random() > 0.2:
            continue
        more = [chance.randint(2, 4) for _ in range(chance.randint(1, 5))]
        left = 63 - pair[0].requests[name].num_computed_tokens - len(more)
        for scheduler in pair:
            if left > 0:
                scheduler.add_request(_request(name, more, left, resumable=True))
            else:
                scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    if chance.random() < 0.05 and pair[0].requests:
        name = chance.choice(sorted(pair[0].requests))
        for scheduler in pair:
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    paused = PauseState.PAUSED_ALL if chance.random() < 0.03 else PauseState.UNPAUSED
    for scheduler in pair:
        scheduler.set_pause_state(paused)


def _request(name: str, prompt: list[int], tokens: int, resumable: bool) -> Request:
    parameters = SamplingParams(max_tokens=tokens, stop_token_ids=[1])
    return Request(name, list(prompt), parameters, None, block_hasher=HASHER, resumable=resumable)


def _answer(scheduler: Any, plan: Any) -> list[tuple[Any, ...]]:
    """What the scheduler makes of drawn tokens, which depend on the request and its length only."""
    names = list(reversed(plan.num_scheduled_tokens))  # the runner has an order of its own
    drawn = []
    for name in names:
        request = scheduler.requests[name]
        complete = request.num_computed_tokens == request.num_tokens
        drawn.append([random.Random(f"{name} {request.num_tokens}").randint(1, 40)] if complete else [])
    made = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, drawn)
    outputs = scheduler.update_from_output(plan, made)
    of_client = outputs[0].outputs if 0 in outputs else []
    return [(out.request_id, out.new_token_ids, out.finish_reason, out.stop_reason) for out in of_client]


def _plain(plan: Any) -> tuple[Any, ...]:
    cached = plan.scheduled_cached_reqs
    return (
        [(new.req_id, new.block_ids, new.num_computed_tokens) for new in plan.scheduled_new_reqs],
        vars(cached),
        plan.num_scheduled_tokens,
        plan.total_num_scheduled_tokens,
        plan.finished_req_ids,
        plan.new_block_ids_to_zero,
        plan.kv_cache_block_copies,
    )


def _state(scheduler: Any) -> tuple[Any, ...]:
    pool = scheduler.kv_cache_manager.block_pool
    requests = {
        name: (request.status, request.num_computed_tokens, request.num_in_flight_tokens, request.is_prefill_chunk)
        for name, request in scheduler.requests.items()
    }
    running = [request.request_id for request in scheduler.running]
    return running, requests, pool.get_num_free_blocks(), len(pool.cached_block_hash_to_block)
