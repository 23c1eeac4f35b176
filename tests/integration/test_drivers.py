"""Drivers in processes of their own: sessions one after the other, on CUDA that torch lacks, deterministic ones, the
self-test of `hybridflow doctor`; and clients of a session's cluster, which answers only to this user's token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch

from hybridflow.cli import doctor
from hybridflow.cluster.orphan_cleanup import processes
from tests.tiny_models import make_policy

ROOT = Path(__file__).resolve().parents[2]


def output(program: str, *arguments: object, timeout: int = 120, **environment: str) -> str:
    """What the program prints in an environment that names no cluster and no token."""
    plain = {n: value for n, value in os.environ.items() if not n.startswith("RAY_AUTH") and n != "RAY_ADDRESS"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=plain | environment, timeout=timeout, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


# Sessions one after the other

SESSIONS = 3
DRIVER = """
import json, os, sys
import ray

def session(ours):
    if ours:
        import hybridflow as hf
        hf.init(devices=1)
        hf.ResourcePool([1])
        hf.shutdown()
        return
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    class Host:
        def done(self):
            return True
    host = ray.remote(Host).remote()
    ray.get(host.done.remote())
    ray.kill(host)
    ray.shutdown()

def kinds():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            kind = os.readlink(f"/proc/self/fd/{number}").partition(":")[0]
        except OSError:  # that of the listing
            continue
        kind = "log" if kind.startswith("/") else kind
        found[kind] = found.get(kind, 0) + 1
    return found

ours, counts = sys.argv[1] == "ours", []
for _ in range(int(sys.argv[2])):
    session(ours)
    counts.append(kinds())
print(json.dumps(counts))
"""


def growth(whose: str) -> dict[str, int]:
    """By kind, descriptors after the last session minus those after the first."""
    counts = json.loads(output(DRIVER, whose, SESSIONS, timeout=420).splitlines()[-1])
    return {kind: count - counts[0].get(kind, 0) for kind, count in counts[-1].items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sessions_leave_no_more_descriptors_than_those_of_ray_alone():
    """Ray keeps two closed connections of each session that had an actor; one may be on its way to that."""
    ours, rays = growth("ours"), growth("ray")
    more = {kind: count - max(0, rays.get(kind, 0)) for kind, count in ours.items()}
    assert more.pop("socket") < SESSIONS - 1
    assert max(more.values()) <= 0, more


COUNTS_GPUS = """
import ray
import hybridflow as hf

class Worker:
    @hf.register(hf.protocols.ONE_TO_ALL)
    def rank(self):
        return self.context.rank

ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, logging_level="ERROR")
try:
    hf.place(Worker, hf.ResourcePool(2))
except hf.errors.HybridFlowError as error:
    print(type(error).__name__, error)
finally:
    hf.shutdown()
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is a CUDA build")
def test_a_cpu_build_of_torch_is_refused_with_the_cure():
    found = output(COUNTS_GPUS, OMP_NUM_THREADS="1", RAY_ADDRESS="", PYTHONPATH=str(ROOT))
    assert f"torch {torch.__version__} is a CPU build. Install the CUDA build" in found
    assert "worker.__init__ failed on rank" in found


DETERMINISTIC = """
import sys
import torch
import hybridflow as hf
from tests.tiny_models import make_prompts

class Shown(hf.ActorWorker):
    @hf.register(hf.ONE_TO_ALL)
    def modes(self):
        import torch  # by value, its module of settings cannot be sent

        return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory

def main():
    numbers = []
    for deterministic in (True, False):
        hf.init(devices=2, deterministic=deterministic)
        generate = hf.VLLM(tp=2, kv_cache_gb=0.05, max_length=64, sampling=hf.Sampling(max_tokens=6, seed=3))
        settings = {"model": sys.argv[1], "train": hf.Megatron(tp=2), "optim": hf.Adam(lr=1e-2), "generate": generate}
        actor = Shown.on(hf.ResourcePool([2]), **settings)
        batch = actor.generate_sequences(make_prompts(4))
        batch |= actor.compute_log_prob(batch)
        found = batch.get()
        rewards = hf.BatchRef.from_batch(found.with_columns(rewards=torch.arange(4.0)))
        trained = actor.update_actor(hf.compute_advantage(rewards, "reinforce_plus_plus") | rewards).get()
        numbers.append((found["response_ids"].values.tolist(), trained["actor/grad_norm"]))
        print("modes:", actor.modes().get())
        hf.shutdown()
    print("equal:", numbers[0] == numbers[1])

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_every_host_is_deterministic(tmp_path, warm):
    (tmp_path / "driver.py").write_text(DETERMINISTIC)
    assert warm.run(tmp_path / "driver.py", make_policy(tmp_path / "policy")).stdout.splitlines() == [
        "modes: [(True, False), (True, False)]",
        "modes: [(False, True), (False, True)]",
        "equal: True",
    ]


@pytest.mark.slow
def test_this_machine_can_run_hybridflow(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # a cluster that is gone does not disturb it
    found = doctor.self_test()
    assert found.cure == ""
    assert "three iterations of GRPO and two engines on 2 devices" in found.found


def test_a_self_test_that_takes_too_long_is_ended():
    assert "did not end within 1 s" in doctor.self_test(1.0).cure


# Tokens

CLIENT = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    print(len(GcsClient(address=sys.argv[1]).get_all_node_info()))
except AuthenticationError:
    print("refused")
"""
TOKEN = """
from hybridflow.cluster.connection import _private_token
from hybridflow.errors import ConfigError
try:
    _private_token()
except ConfigError as error:
    print(error)
"""

JOIN = """
import sys
import hybridflow as hf
from hybridflow.errors import ConfigError
try:
    hf.init(address=sys.argv[1])
    print("joined")
except ConfigError as error:
    print(error)
"""


def test_only_clients_with_the_token_reach_a_local_cluster(cluster, pool):
    """Also on this machine: a process of another user cannot read it."""
    address = ray.get_runtime_context().gcs_address
    path = Path.home() / ".ray" / "auth_token"
    token = path.read_text()
    assert (path.stat().st_mode & 0o777, len(token)) == (0o600, 64)
    assert output(CLIENT, address, RAY_AUTH_MODE="token") == "1"
    assert output(CLIENT, address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64) == "refused"
    assert output(CLIENT, address, RAY_AUTH_MODE="disabled") == "refused"
    for pid in {os.getpid(), *processes(cluster.name, cluster.backend.directory)}:
        assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("named", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"])
def test_rays_token_is_made_for_this_user_alone(named, tmp_path):
    home, path = {"HOME": str(tmp_path)}, tmp_path / ".ray" / "auth_token"
    assert output(TOKEN, **home, **{named: "disabled"}) == ""  # the environment's choice stays
    assert not path.exists()
    assert output(TOKEN, **home) == ""
    token = path.read_text()
    assert (path.stat().st_mode & 0o777, len(token)) == (0o600, 64)
    path.chmod(0o644)
    assert output(TOKEN, **home) == ""
    assert (path.stat().st_mode & 0o777, path.read_text()) == (0o600, token)
    assert [file.name for file in path.parent.iterdir()] == ["auth_token"]


def test_a_token_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / ".ray").write_text("in the way")
    assert "cannot be made this user's alone" in output(TOKEN, HOME=str(tmp_path))


def test_joining_a_cluster_with_another_token_says_so(cluster, pool):
    address = ray.get_runtime_context().gcs_address
    asks = f"the Ray cluster at {address} asks for a token"
    assert asks in output(JOIN, address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
    assert asks in output(JOIN, address, RAY_AUTH_MODE="disabled")
