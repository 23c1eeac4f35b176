"""A cluster that a session starts answers only to clients with this user's token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from hybridflow.cluster.orphan_cleanup import processes

ROOT = Path(__file__).resolve().parents[2]
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


def output(program: str, *arguments: str, **environment: str) -> str:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=plain | environment, timeout=120, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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
