"""Generation on CUDA: vLLM's GPU worker and sleep mode, one engine after the other, and engines of two devices."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hybridflow as hf
from hybridflow.engines.call_events import MAPPED
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.vllm import core, isolation
from hybridflow.engines.vllm.engine import VLLMEngine
from hybridflow.errors import DeviceMemoryError
from hybridflow.models.spec import ModelSpec
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ONE_TO_ALL
from hybridflow.topology import RankGrid
from tests.tiny_models import make_policy, make_prompts, response_log_probs

pytestmark = pytest.mark.gpu
GREEDY = hf.Sampling(max_tokens=6, greedy=True, ignore_eos=True)
DRAWN = hf.Sampling(max_tokens=6, ignore_eos=True)
SMALL: dict[str, Any] = {"memory_fraction": 0.2, "max_sequences": 16, "sampling": GREEDY}
NEAR = 0.05  # of log-probabilities in bfloat16
MIB = 1 << 20
numbers = itertools.count()
modes = pytest.mark.parametrize("eager", [True, False], ids=["eager", "sleep mode"])


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def build(world, policy) -> Iterator[Any]:
    """Starts engines with the policy's weights, on the first device; the last is closed after the test."""
    engines: list[VLLMEngine] = []

    def build(path: Path = policy, **settings: Any) -> VLLMEngine:
        grid = RankGrid(p_g=1, t_g=1)
        context = world.context(f"generation-{next(numbers)}", grid)
        strategy = hf.VLLM(**{**SMALL, **settings})
        engines.append(VLLMEngine(context, strategy, grid.generation(), ModelSpec.from_checkpoint(path), path))
        Checkpoint(path).read_into(engines[-1].layout(), 0, engines[-1].storage())
        engines[-1].weights_changed()
        return engines[-1]

    yield build
    for engine in engines[-1:]:
        engine.close()


def error_of(
    engine: VLLMEngine, policy: Path, prompts: hf.Batch | None = None, sampling: hf.Sampling = GREEDY
) -> float:
    """Largest difference of log-probabilities from those of transformers, in float32."""
    prompts = make_prompts(4) if prompts is None else prompts
    rows = [several[0] for several in engine.generate(prompts["prompt_ids"].tolist(), sampling)]
    drawn = prompts.with_columns(response_ids=hf.Ragged.from_rows([torch.tensor(row.token_ids) for row in rows]))
    found = torch.tensor([value for row in rows for value in row.log_probs])
    return float((found - response_log_probs(policy, drawn).values).abs().max())


def free() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def filled(left: int = 0) -> Tensor:
    """Takes the device's memory in whole pages, except for `left` bytes or a page more."""
    page = 2 * MIB
    for size in range((free() - left) // page * page, 0, -page):  # the driver may need a page for its tables
        with contextlib.suppress(torch.OutOfMemoryError):
            return torch.empty(size, dtype=torch.uint8, device="cuda")
    raise AssertionError("the device has no memory at all")


@modes
def test_engines_follow_one_another(build, policy, eager):
    """Whether they are closed awake or asleep, and they leave nothing."""
    left = []
    for turn in range(4):
        engine = build(eager=eager)
        assert error_of(engine, policy, sampling=GREEDY if turn % 2 else DRAWN) < NEAR
        if turn % 2:
            engine.sleep()
            engine.memory().release()
        engine.close()
        left.append((free(), torch.cuda.memory_allocated()))
    assert left[1] == left[2] == left[3]


def test_a_closed_engine_frees_its_memory_while_somebody_holds_it(build):
    """Its tensors are gone with the last reference."""
    engine = build()
    before, storage = free(), engine.storage()
    engine.close()
    gained = free() - before
    assert gained > 0.15 * torch.cuda.mem_get_info()[1]
    with pytest.raises(hf.errors.PlacementError, match="Drop all tensors of its storage"):
        build()
    assert len(storage) > 3
    del storage
    gc.collect()
    assert build().cache_bytes


def test_closing_maps_nothing(build, policy):
    """Training may have taken the memory of an engine that sleeps."""
    engine = build()
    engine.sleep()
    engine.memory().release()
    memory = filled(left=8 * MIB)
    engine.close()
    assert free() < 64 * MIB
    del memory
    assert error_of(build(), policy) < NEAR


@modes
def test_memory_that_is_lacking_when_it_wakes(build, policy, eager):
    """It sleeps on, and wakes when there is room again."""
    engine = build(eager=eager)
    engine.sleep()
    engine.memory().offload()
    memory = filled()
    before = free()
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            engine.wake()
        assert (free(), engine.cache_bytes) == (before, 0)
    if not eager:  # such small tensors may fit into what torch keeps
        with pytest.raises(torch.OutOfMemoryError, match=r"weights need .* bytes, .* are free"):
            engine.memory().acquire()
    del memory
    engine.memory().acquire()
    engine.wake()
    assert error_of(engine, policy) < NEAR


def test_a_start_that_vllm_gives_up_leaves_nothing(build, policy, monkeypatch):
    """As where another process frees memory while it measures: the next engine starts."""

    def changed(worker: Any) -> int:
        measured(worker)
        raise AssertionError("Error in memory profiling")

    from vllm.v1.worker.gpu_worker import Worker  # importable where CUDA is

    with monkeypatch.context() as patch:
        measured = Worker.determine_available_memory
        patch.setattr(Worker, "determine_available_memory", changed)
        for _ in range(2):
            with pytest.raises(AssertionError, match="memory profiling"):
                build()
    assert error_of(build(), policy) < NEAR


@modes
def test_memory_that_is_lacking_at_the_start(build, policy, eager):
    little = MIB / torch.cuda.mem_get_info()[1]
    with pytest.raises(
        DeviceMemoryError, match=rf"memory_fraction={little:g}\) asks for .* Use a higher memory_fraction"
    ):
        build(eager=eager, memory_fraction=little)
    before, memory = free(), filled(left=torch.cuda.mem_get_info()[1] // 2)
    with pytest.raises(DeviceMemoryError, match=r"memory_fraction=0.7\) asks for .* Use a lower memory_fraction"):
        build(eager=eager, memory_fraction=0.7)
    del memory
    assert abs(before - free()) < 4 * MIB
    assert error_of(build(eager=eager), policy) < NEAR


def test_memory_counts_where_it_is(build):
    """torch counts tensors of a sleeping engine, too."""
    before = MAPPED.now()
    engine = build()
    awake = MAPPED.now()
    assert awake == torch.cuda.memory_allocated()
    assert awake - before > engine.cache_bytes
    engine.sleep()
    engine.memory().offload()
    asleep = MAPPED.now()
    assert asleep - before < 0.1 * (awake - before)
    assert MAPPED.peak(restart=True) >= awake
    assert MAPPED.peak() < awake
    engine.wake()
    assert awake > MAPPED.peak() > asleep
    engine.memory().acquire()
    assert MAPPED.now() == MAPPED.peak() == awake


@modes
def test_keys_and_values_wait_in_memory_of_the_device_or_of_the_host(build, eager):
    """Bit for bit, whatever others write meanwhile; on the device it is the used blocks that keep memory."""
    engine, prompts = build(eager=eager), make_prompts(6)["prompt_ids"].tolist()

    def drawn(*places: Any) -> list[Any]:
        engine.weights_changed()
        engine.submit(engine.new_rows(prompts, replace(DRAWN, max_tokens=24), range(6)))
        for kv in places:
            engine.advance(hf.Until(steps=4))
            if kv is not None:
                before = MAPPED.now() - engine.cache_bytes
                engine.sleep(kv)
                used = len(engine._loop.blocks(engine._loop.cached())) * engine._image._block_bytes
                assert engine.cache_bytes == (used if kv == "keep" else 0)
                assert MAPPED.now() - before < used * (kv == "keep") + MIB
                torch.empty(torch.cuda.mem_get_info()[0] // 2, dtype=torch.uint8, device="cuda").fill_(0xFF)
                torch.cuda.empty_cache()
                engine.wake()
        engine.advance()
        return [
            (row.token_ids, row.log_probs, row.recomputed) for row in sorted(engine.take(), key=lambda row: row.name)
        ]

    awake = drawn(None, None)
    assert drawn("keep", "keep") == drawn("offload", "keep") == drawn("offload", "offload") == awake
    (loaded, stored), again = engine.copied_bytes(), drawn("recompute")
    assert loaded == stored > 0
    assert [row[2] > 0 for row in again] == [True] * 6
    assert engine.copied_bytes() == (loaded, stored)


def test_the_device_keeps_what_others_have_left_room_for(build):
    """How much they need is known once they have had the device; then the planner's constants decide, and "keep" keeps
    what has room, all else is computed again."""
    engine, prompts = build(kv="auto"), make_prompts(6)["prompt_ids"].tolist()
    rooms, image = list[float](), engine._image
    assert image._room("keep") > 50 * MIB
    for taken in (0.1, 0.95, 0.1):
        rooms.append(image._room("auto"))
        engine.sleep()
        torch.empty(int(free() * taken), dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        engine.wake()
    rooms.append(image._room("auto"))
    assert rooms[0] == 0
    assert rooms[1] > 50 * MIB > 0 >= rooms[2]
    assert rooms[3] == pytest.approx(rooms[1], rel=0.05) == image._room("keep")
    engine.submit(engine.new_rows(prompts, replace(DRAWN, max_tokens=8), range(6)))
    engine.advance(hf.Until(steps=4))
    assert image._beside is not None
    image._beside += int(rooms[3]) + 2 * image._block_bytes  # room for less than nothing
    engine.sleep("keep")
    assert engine.cache_bytes == 0
    engine.wake()
    engine.advance()
    assert all(row.recomputed for row in engine.take())


def test_a_cache_is_written_once_when_it_wakes(build, monkeypatch):
    engine, written = build(), list[int]()
    monkeypatch.setattr("hybridflow.engines.vllm.engine.zero_pages", lambda storage: written.append(storage.nbytes()))
    engine.sleep()
    engine.wake()
    assert sum(written) == len(set(written)) * written[0] < 0.2 * torch.cuda.mem_get_info()[1]


def test_long_prompts_take_several_steps(build, tmp_path, monkeypatch):
    """A context does not decide how much memory a step takes."""
    path = make_policy(tmp_path, max_position_embeddings=16384)
    engine = build(path)
    assert engine._runner().max_num_tokens == 8192
    engine.close()
    monkeypatch.setattr(core, "_STEP_TOKENS", 32)
    prompts = hf.Batch({"prompt_ids": hf.Ragged.from_rows([torch.arange(n) % 40 + 3 for n in (90, 5, 33)])})
    engine = build(path)
    assert engine._runner().max_num_tokens == 32
    assert error_of(engine, path, prompts=prompts) < NEAR


def test_penalties_and_bias_change_draws_and_not_log_probs(build, policy):
    engine, prompts = build(), [[5, 9, 33], [12, 7]]

    def rows(sampling: hf.Sampling) -> list[Any]:
        return [row for several in engine.generate(prompts, sampling) for row in several]

    forced = replace(GREEDY, max_tokens=6, logit_bias={17: 1000.0})
    found = rows(forced)
    assert [row.token_ids for row in found] == [[17] * 6] * 2
    assert max(max(row.log_probs) for row in found) < -1e-3  # those of the policy, not of the edited logits
    alternating = replace(forced, logit_bias={17: 1000.0, 18: 990.0}, frequency_penalty=2.0, max_tokens=40)
    for row in rows(alternating):
        assert row.token_ids[:3] == [17] * 3
        assert set(row.token_ids) == {17, 18}, row.token_ids
    greedy = [row.token_ids for row in rows(GREEDY)]
    assert [row.token_ids for row in rows(replace(DRAWN, min_p=1.0))] == greedy


class Host(hf.Worker):
    """Takes memory of the host's device."""

    role = "host"

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    @register(ONE_TO_ALL, blocking=True)
    def fill(self, left: int) -> None:
        self.memory = filled(left)

    @register(ONE_TO_ALL, blocking=True)
    def empty(self) -> None:
        self.memory = None
        torch.cuda.empty_cache()

    @register(ONE_TO_ALL, blocking=True)
    def cudnn_attention(self) -> bool:
        return torch.backends.cuda.cudnn_sdp_enabled()


class Opened(hf.ActorWorker):
    """Remembers what training had on the device when vLLM started."""

    def open_generation(self) -> None:
        start = VLLMEngine.__init__

        def watched(*args: Any) -> None:
            self.found = self.engine.resident_bytes()
            start(*args)

        with isolation.replaced(VLLMEngine, "__init__", watched):
            super().open_generation()

    @register(ONE_TO_ALL, blocking=True)
    def resident_then_and_now(self) -> tuple[dict[str, int], dict[str, int]]:
        return self.found, self.engine.resident_bytes()


@pytest.fixture(scope="module")
def pool() -> Iterator[hf.ResourcePool]:
    """Two devices, with a host on each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    hf.init()
    yield hf.ResourcePool([2])
    hf.shutdown()


def test_ranks_that_see_their_own_device_only_share_layers(pool, policy):
    """Also where vLLM's own all-reduce would ask for the devices of its peers. A call without memory can be made again,
    and training computes the same in hosts with and without vLLM."""
    host = Host.on(pool)
    assert not any(host.cudnn_attention())
    rollout = hf.RolloutWorker.on(pool, model=str(policy), generate=hf.VLLM(tp=2, **SMALL), offload=True)
    host.fill(left=8 * MIB)
    with pytest.raises(DeviceMemoryError, match=r"rollout\.generate_sequences .*out of device memory.*are free"):
        rollout.generate_sequences(make_prompts(4)).get()
    host.empty()
    found = rollout.generate_sequences(make_prompts(4)).get()
    exact = response_log_probs(policy, found)
    assert (found["log_probs"].values - exact.values).abs().max() < NEAR
    rollout.close()
    host.fill(left=torch.cuda.mem_get_info()[1] // 2)
    with pytest.raises(DeviceMemoryError, match=r"memory_fraction=0.7\) asks for .*In it: .*Planned for generation"):
        hf.RolloutWorker.on(pool, model=str(policy), generate=hf.VLLM(tp=2, **SMALL | {"memory_fraction": 0.7}))
    host.close()


def test_state_that_waits_while_generating_waits_while_vllm_starts(pool, policy):
    """vLLM refuses to start where the memory of its share is not free."""
    training: dict[str, Any] = {"train": hf.Megatron(), "optim": hf.Adam(lr=1e-3)}
    generation: dict[str, Any] = {"generate": hf.VLLM(**SMALL), "offload": ("optimizer", "gradients")}
    actor = Opened.on(pool, model=str(policy), **training, **generation)
    for then, now in actor.resident_then_and_now():
        assert (then["optimizer"], then["gradients"]) == (0, 0)
        assert min(now.values()) > 0
    actor.close()
