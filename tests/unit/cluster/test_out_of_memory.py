"""What a call that runs out of device memory reports; the figures are made up, torch's exception is real."""

from __future__ import annotations

import pickle
import re

import pytest
import torch

import hybridflow as hf
from hybridflow.cluster.device import DeviceUse, cuda_problem, device_index, explain
from hybridflow.errors import DeviceMemoryError, HybridFlowError

GIB = 1 << 30
RESIDENT = {
    ("actor", "parameters"): 14 * GIB,
    ("actor", "optimizer"): 28 * GIB,
    ("actor", "kv_cache"): 0,
    ("critic", "parameters"): 7 * GIB,
}
USE = DeviceUse(80 * GIB, GIB // 2, RESIDENT, {"actor": 0.4})
ACTOR = {
    "train": hf.Megatron(tp=2, micro_tokens=8192),
    "generate": hf.VLLM(tp=2, memory_fraction=0.4, sampling=hf.Sampling(max_tokens=777)),
    "offload": ("generation",),
}
SAID = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80 GiB"


def test_the_message_has_phase_contents_plan_and_settings():
    text = explain("actor", "update_actor", "", USE, ACTOR, SAID)
    for part in (
        "actor.update_actor ran out of device memory: CUDA out of memory. Tried to allocate 2.00 GiB",
        "The device has 80.00 GiB, of which 0.50 GiB are free",
        "actor optimizer 28.00 GiB, actor parameters 14.00 GiB, critic parameters 7.00 GiB",
        "all else (activations, buffers, other processes) 30.50 GiB",
        "Planned for generation: actor VLLM(memory_fraction=0.4) = 32.00 GiB",
        "train=...(micro_tokens=...) (now 8192)",
        "recompute=True",
        "(now ('generation',))",
        "ZeRO(stage=3)",
    ):
        assert part in text
    assert "kv_cache" not in text  # it has no memory
    assert "max_tokens" not in text


@pytest.mark.parametrize(
    ("method", "stage", "named", "absent"),
    [
        ("generate_sequences", "generation", ("(now 0.4)", "(now 777)", "offload"), ("micro_tokens",)),
        ("generate_sequences", "", ("(now 0.4)", "(now 777)"), ("micro_tokens",)),
        ("generate_sequences", "transition", ("offload", "hf.VLLM(tp=...) (now 2)"), ("max_tokens", "micro_tokens")),
        ("compute_log_prob", "", ("(now 8192)", "offload"), ("max_tokens", "recompute")),
        ("update_actor", "transition", ("offload", "hf.VLLM(tp=...) (now 2)"), ("micro_tokens",)),
        (
            "__init__",
            "",
            ("larger tp or pp", "(now Megatron(tp=2, pp=1))", "(now 0.4)"),
            ("micro_tokens", "max_tokens"),
        ),
        ("save", "", ("offload",), ("micro_tokens",)),
    ],
)
def test_each_phase_names_its_own_settings(method, stage, named, absent):
    text = explain("actor", method, stage, USE, ACTOR, SAID).partition("Change one of: ")[2]
    assert all(part in text for part in named)
    assert not any(part in text for part in absent)


def test_settings_that_a_group_lacks_or_has_used_are_not_named():
    alone = DeviceUse(80 * GIB, 0, {}, {})
    text = explain("critic", "update_critic", "", alone, {"train": hf.FSDP(recompute=True), "offload": False}, SAID)
    assert "Planned for generation: nothing" in text
    assert "recompute" not in text
    assert "memory_fraction" not in text
    assert "(now FSDP(tp=1))" in text
    beside = explain("critic", "update_critic", "", USE, {"train": hf.FSDP()}, SAID)
    assert "memory_fraction" in beside  # of the actor, on the same device
    assert "Change one of: offload=" in explain("own", "double", "", alone, {}, SAID)


def test_figures_that_contradict_each_other_give_no_negative_bytes():
    assert (
        "-" not in explain("a", "double", "", DeviceUse(GIB, GIB, {("a", "b"): GIB}, {}), {}, "x").partition("In it")[2]
    )


def test_the_error_survives_pickling():
    error = DeviceMemoryError("text")
    assert isinstance(error, HybridFlowError | RuntimeError)
    assert str(pickle.loads(pickle.dumps(error))) == "text"
    assert issubclass(torch.OutOfMemoryError, RuntimeError)


def test_images_in_host_memory_are_named_apart():
    use = DeviceUse(80 * GIB, 0, {("actor", "parameters"): 20 * GIB, ("actor", "image"): 30 * GIB}, {})
    said = explain("actor", "update_actor", "", use, {}, "out of memory")
    assert "In it: actor parameters 20.00 GiB, all else (activations, buffers, other processes) 60.00 GiB." in said
    assert "In host memory: actor 30.00 GiB." in said


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (("2.13.0+cpu", None, "580.65.06"), r"580.65.06 .*2.13.0\+cpu is a CPU.*hybridflow\[gpu\].*to run on the"),
        (("2.13.0+cu130", "13.0", "570.124.06"), "570.124.06 .*built for CUDA 13.0, which needs driver 580 or newer"),
        (("2.13.0+cu126", "12.6", "470.82"), "needs driver 525 or newer"),
        (("2.13.0+cu130", "13.0", "580.65.06", "no CUDA-capable device"), "cannot use them: no CUDA-capable device"),
        (("2.13.0+cu130", "13.0", "", "CUDA unknown error"), "driver .of unknown version.*CUDA unknown error"),
        (("2.14.0+cu140", "14.0", "580.65.06", "too old"), "cannot use them: too old"),
    ],
)
def test_an_unusable_driver_is_named_with_its_cure(answers: tuple[str, ...], message: str):
    assert re.search(message, cuda_problem(*answers))


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [
        ([3], "3", 0),  # Ray shows a host its own device
        ([3], None, 3),  # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1
        ([0], "", 0),
        (["6"], "4,6", 1),  # ... of devices that the user chose
        (["GPU-b"], "GPU-a,GPU-b", 1),
        ([], None, 0),
        ([], "2", 0),
    ],
)
def test_a_host_takes_the_device_that_it_was_given(assigned: list, visible: str | None, index: int):
    assert device_index(assigned, visible) == index
