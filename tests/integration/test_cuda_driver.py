"""A cluster that counts GPUs, where torch is a CPU build."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

DRIVER = """
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
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "", "PYTHONPATH": os.getcwd()}
    found = subprocess.run(
        [sys.executable, "-c", DRIVER], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert f"torch {torch.__version__} is a CPU build. Install the CUDA build" in found.stdout, found.stderr
    assert "worker.__init__ failed on rank" in found.stdout
