"""Clusters of several machines, made of namespaces: any names, `hybridflow doctor`, SLURM."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.planner.cost.hardware import LayerProfile
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from tests.multinode.machines import Machines, missing
from tests.tiny_models import SIZES

pytestmark = pytest.mark.skipif(bool(why := missing()), reason=why or "it can")
COLLECTIVE = """
import socket, torch, torch.distributed as dist
import hybridflow as hf
class Sum(hf.Worker):
    @hf.register(hf.ONE_TO_ALL)
    def total(self):
        x = torch.ones(3)
        dist.all_reduce(x, group=self.context.groups.everyone())
        return x.sum().item(), socket.gethostname()
hf.init(collective_timeout=40, peer_timeout=60)
print(sorted(hf.place(Sum, hf.ResourcePool([1, 1])).total().get()))
hf.shutdown()
"""


ANSWER = "[(6.0, 'node1'), (6.0, 'node2')]"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Machines]:
    with Machines(tmp_path_factory.mktemp("pair"), 2, "debian") as machines:
        yield machines


def answer(machines: Machines) -> str:
    (machines.shared / "driver.py").write_text(COLLECTIVE)
    return machines.run(1, ["python", "driver.py"], timeout=150).stdout


def test_machines_compute_together_whose_names_are_loopback_addresses(pair):
    """As on Debian: 127.0.1.1 is the machine's name."""
    assert ANSWER in (said := answer(pair)), said[-4000:]


@pytest.mark.slow
def test_a_profile_has_the_bandwidth_between_machines(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "llama", "num_hidden_layers": 2}))
    sizes = ["--devices", "2", "--length", "32", "--tokens", "128", "--rows", "4", "--repeats", "3"]
    with Machines(tmp_path, 2) as machines:
        machines.slow(2, "100mbit")
        command = ["hybridflow", "profile", str(tmp_path), *sizes, "--between-nodes", "--save", str(tmp_path / "found")]
        said = machines.run(1, ["python", "-m", *command], timeout=400).stdout
    found = LayerProfile.load(tmp_path / "found")
    assert found.network is not None
    assert 0.5 < found.network / (100e6 / 8) < 1.15, said[-4000:]  # less where the machine is busy
    assert found.bandwidth is not None
    assert found.bandwidth > 4 * found.network
    assert found.measured(ClusterSpec.of("here:2")).bandwidth == found.network


@pytest.mark.slow
def test_machines_need_not_know_their_names(tmp_path):
    with Machines(tmp_path, 2, "none") as machines:
        said = answer(machines)
    assert ANSWER in said, said[-4000:]


def examined(machines: Machines, shared: str) -> tuple[int, list[str]]:
    done = machines.run(1, ["python", "-m", "hybridflow", "doctor", "--cluster", "--shared", shared], timeout=120)
    return done.returncode, [" ".join(line.split()) for line in done.stdout.splitlines()]


def test_machines_are_examined(pair):
    status, said = examined(pair, str(pair.shared))
    other = [line for line in said if "FAIL" in line and " memory: " not in line]  # other tests may hold it
    assert not other, said
    assert status == 0 or any("too little is free" in line for line in said), said
    for name, address in (("node1", "10.77.0.1"), ("node2", "10.77.0.2")):
        assert f"ok {name} {address}, 2 of 2 CPUs free" in said
        assert f"ok {name} name: {name} is 127.0.1.1 there" in said
        assert f"ok {name} connections to 1 others" in said
        assert f"ok {name} {pair.shared} is shared with this machine" in said
    assert not [path for path in pair.shared.iterdir() if "doctor" in path.name]


def test_a_directory_of_one_machine_is_named(pair):
    status, said = examined(pair, "/tmp")
    assert status != 0
    assert "ok node1 /tmp is shared with this machine" in said
    assert "FAIL node2 /tmp is not shared with this machine" in said


# Runs a command on the machines of an allocation, through files that the test reads: what `srun` does with a network.
SRUN = """#!/usr/bin/env python
import json, os, signal, sys, time
from pathlib import Path
words = sys.argv[1:]
options = [words.pop(0) for _ in range(next(at for at, word in enumerate(words) if not word.startswith("-")))]
assert options == ["--nodes=1", "--ntasks-per-node=1", "--exclude=node1", "--overlap"], options
asked = Path(os.environ["SHARED"], "asked")
asked.with_suffix(".new").write_text(json.dumps([words, {n: v for n, v in os.environ.items() if n.startswith("RAY_")}]))
signal.signal(signal.SIGTERM, lambda *_: (asked.with_suffix(".over").touch(), sys.exit(143)))
asked.with_suffix(".new").rename(asked)
while True:
    time.sleep(1)
"""


@pytest.mark.slow
def test_the_script_for_slurm_runs_a_driver_on_two_machines(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    (tmp_path / "slurm.sh").write_text(page.partition("### SLURM")[2].partition("```bash\n")[2].partition("```")[0])
    (tmp_path / "driver.py").write_text(COLLECTIVE)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    with Machines(tmp_path, 2, joined=False) as machines:
        path = f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"
        allocation = {"SLURM_NNODES": "2", "SLURMD_NODENAME": "node1", "SHARED": str(tmp_path), "PATH": path}
        written = tmp_path / "output"
        with written.open("w") as output:
            command = machines.command(1, ["bash", "slurm.sh", "driver.py"], **allocation)
            script = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while not (tmp_path / "asked").exists():
            assert script.poll() is None, written.read_text()
            time.sleep(0.2)
        words, variables = json.loads((tmp_path / "asked").read_text())
        other = subprocess.Popen(machines.command(2, words, **variables), stdout=subprocess.DEVNULL)
        assert script.wait(90) == 0, written.read_text()
        assert (tmp_path / "asked.over").exists()  # the script has ended the step
        other.terminate()
        other.wait(30)
    assert ANSWER in written.read_text()


# The other machine has opened its end of a link, and waits, when it is lost; this one connects to it then.
LINK = """
import time
from pathlib import Path
import torch
import hybridflow as hf
from hybridflow.engine3d.layout import Box, Layout, Region
class Vector(hf.Worker):
    def __init__(self):
        self.vector = torch.zeros(4)
    @classmethod
    def worker_spec(cls, settings):
        def layout(grid):
            return Layout({"v": (4,)}, grid.size, lambda rank: [Region(Box("v", (0,), (4,)), "v", (0,))])
        return hf.WorkerSpec(layout=layout)
    def weights_storage(self):
        return {"v": self.vector}
    @hf.register(hf.ONE_TO_ALL)
    def wait(self, path):
        while not Path(path).exists():
            time.sleep(0.05)
hf.init()
stays, leaves = (hf.place(Vector, hf.ResourcePool([1], nodes=[n]), name=f"at {n}") for n in ("node1", "node2"))
stays.wait("lost")
moved = hf.sync_weights(stays, leaves)
time.sleep(1)
print("opened", flush=True)
while not Path("lost").exists():
    time.sleep(0.05)
lost = time.time()
try:
    moved.get()
except hf.errors.HostLostError as error:
    print(error)
stays.wait("lost").get(timeout=300)
print(f"free after {time.time() - lost:.1f} s", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "link down"])
def test_a_machine_lost_while_a_link_is_opened_is_not_waited_for(tmp_path, how):
    (tmp_path / "driver.py").write_text(LINK)
    with Machines(tmp_path, 2) as machines:
        command = machines.command(1, ["python", "-u", "driver.py"])
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
            assert driver.stdout is not None
            said = ""
            for line in driver.stdout:
                said += line
                if line == "opened\n":
                    machines.kill(2) if how == "killed" else machines.link(2, "down")
                    (tmp_path / "lost").touch()
                if line.startswith("free"):
                    break
            driver.kill()
    assert "at node2.sync_weights on rank 0 (node node2) was lost" in said, said[-4000:]
    assert "free after" in said
