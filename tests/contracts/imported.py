"""What rank processes and warm programs compute with, imported once by the server that forks them: vLLM alone takes ten
seconds. Not Ray, which reads the environment when it is imported. On CUDA not vLLM, which initialises it."""

import gc
import os
import sys

import torch

from hybridflow.engines.vllm import isolation

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    sys.modules["ray"] = None  # type: ignore[assignment]  # vLLM would import it
    isolation.prepare("cpu")
    with isolation.fence(torch.device("cpu")):
        import peft  # noqa: F401
        import vllm.engine.arg_utils
        import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
        import vllm.model_executor.models.llama
        import vllm.v1.engine.core
        import vllm.v1.worker.cpu_worker  # noqa: F401
        from vllm.platforms import current_platform

        current_platform.register_triton_kernel_overrides()  # which searches every module, once per process

import hybridflow.engines.fsdp.engine  # noqa: E402
import hybridflow.engines.megatron.engine  # noqa: E402
import hybridflow.engines.vllm.engine  # noqa: E402
import hybridflow.engines.vllm.sampler  # noqa: E402, F401
from tests.contracts import engine_tasks, state_tasks  # noqa: E402, F401

sys.modules.pop("ray", None)
gc.collect()
gc.freeze()  # for all copies: a collection that looks at what was imported takes a second, and copies its pages
