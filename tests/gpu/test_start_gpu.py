"""The start of a run on CUDA devices: which device and how many threads a host has. Each program is one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

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
        return [*seen, ray.get_gpu_ids(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]]

pool = hf.ResourcePool(DEVICES)
group = hf.place(About, pool)
print(json.dumps({"ranks": group.about().get(), "devices": [one["device"] for one in pool.devices()]}))
hf.shutdown()
"""


def run(program: str, **environment: str) -> Any:
    """The last line that the program prints, as JSON."""
    known = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RAY_ADDRESS")}
    paths = os.pathsep.join([*sys.path, os.getcwd()])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**known, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


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
    ((*_, threads, variable),) = run(program, CUDA_VISIBLE_DEVICES="0")["ranks"]
    assert (threads, variable) == (share, str(share))
    ((*_, threads, variable),) = run(program, OMP_NUM_THREADS="3")["ranks"]
    assert (threads, variable) == (3, "3")
