"""The start of a run on CUDA devices: what a host has of its node, and what a device cannot hold.

Sessions are programs of their own, as those of users are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make_policy

pytestmark = pytest.mark.gpu
NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
ABOUT = """
import json, os, ray, torch
import hybridflow as hf

class About:
    @hf.register(hf.protocols.ONE_TO_ALL)
    def about(self):
        here = torch.ones(4, device=self.context.device)
        seen = str(here.device), torch.cuda.current_device()
        return [*seen, ray.get_gpu_ids(), torch.get_num_threads()]

pool = hf.ResourcePool(DEVICES)
group = hf.place(About, pool)
print(json.dumps({"ranks": group.about().get(), "devices": [one["device"] for one in pool.devices()]}))
hf.shutdown()
"""


def printed(*arguments: str, **environment: str) -> str:
    """By Python with these arguments."""
    known = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RAY_ADDRESS")}
    paths = os.pathsep.join([*sys.path, os.getcwd()])
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**known, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run(program: str, *arguments: str, **environment: str) -> Any:
    """The last line that the program prints, as JSON."""
    return json.loads(printed("-c", program, *arguments, **environment).splitlines()[-1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("shown", ["", "1"])
def test_every_host_computes_on_the_device_that_it_was_given(shown: str):
    found = run(ABOUT.replace("DEVICES", "2"), **({NOSET: shown} if shown else {}))
    for device, current, assigned, *_ in found["ranks"]:
        assert device == f"cuda:{current}"
        assert current == (int(assigned[0]) if shown else 0)
    assert len({assigned[0] for _, _, assigned, *_ in found["ranks"]}) == 2


def test_a_host_has_its_share_of_the_cores():
    """Ray would give it one."""
    share, program = len(os.sched_getaffinity(0)), ABOUT.replace("DEVICES", "1")
    assert run(program, CUDA_VISIBLE_DEVICES="0")["ranks"][0][-1] == share
    assert run(program, OMP_NUM_THREADS="3")["ranks"][0][-1] == 3


CROWDED = """
import json, sys
import hybridflow as hf

pool = hf.ResourcePool(1)
model, fraction = sys.argv[1], float(sys.argv[2])
hf.ReferenceWorker.on(pool, model=model)
try:
    generate = hf.VLLM(memory_fraction=fraction, eager=True, max_length=64)
    hf.ActorWorker.on(pool, model=model, optim=hf.Adam(lr=1e-3), generate=generate)
    print(json.dumps("placed"))
except hf.errors.PlacementError as error:
    print(json.dumps(str(error)))
hf.shutdown()
"""


def test_groups_that_the_device_cannot_hold_are_refused_when_they_are_placed(tmp_path: Path):
    """Their own state needs the ten thousandth of the device that generation leaves."""
    model = make_policy(tmp_path / "policy", hidden_size=512, intermediate_size=1024, num_hidden_layers=4)
    said = run(CROWDED, str(model), "0.9999")
    assert "actor does not fit on its devices: while actor generates, a device of" in said
    assert "actor optimizer" in said
    assert "reference weights" in said
    assert run(CROWDED, str(model), "0.2") == "placed"


def test_the_self_test_of_doctor():
    """Two engines that capture graphs, one after the other, cut over two devices where there are two."""
    said = printed("-m", "hybridflow.cli.self_test")
    devices = min(2, torch.cuda.device_count())
    assert f"three iterations of GRPO and two engines on {devices} device" in said
