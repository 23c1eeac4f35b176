"""Emulated CUDA's plugin: a test fails for faults in its process, in a child, and in what its module prepared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("EMULATED_CUDA" not in os.environ, reason="a real device does not find faults"),
]
PLANTED = '''
import subprocess, sys, pytest, torch

RACE = """
import torch
x = torch.ones(1 << 16, device="cuda") + 1
with torch.cuda.stream(torch.cuda.Stream()):
    x * 2
torch.cuda.synchronize()
"""

@pytest.fixture(scope="module")
def prepared():
    exec(RACE)

def test_without_a_fault():
    assert float(torch.ones(3, device="cuda").sum()) == 3

def test_here():
    exec(RACE)

def test_in_a_child():
    subprocess.run([sys.executable, "-c", RACE], check=True)

def test_prepared(prepared):
    pass

def test_after_them():
    pass
'''


def test_faults_fail_tests(tmp_path: Path):
    assert torch.cuda.is_available()
    (tmp_path / "test_planted.py").write_text(PLANTED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_planted.py"]
    env = {name: value for name, value in os.environ.items() if name != "CI"}  # it makes pytest repeat its findings
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    errors = [line.split("::")[1].split()[0] for line in done.stdout.splitlines() if line.startswith("ERROR")]
    assert errors == ["test_here", "test_in_a_child", "test_prepared"], done.stdout + done.stderr
    assert done.stdout.count("race: mul.Tensor reads") == 3
