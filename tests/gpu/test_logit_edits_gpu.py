"""Edits of logits on a device are those on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridflow.config import Sampling
from hybridflow.engines.vllm.engine_loop import LogitEdits

pytestmark = pytest.mark.gpu


def test_edits_on_a_device_are_those_on_the_cpu():
    sampling = Sampling(
        min_p=0.2, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.25, logit_bias={3: 2.0, 40: -1.0}
    )
    edits = LogitEdits(sampling, ((7,), (5, 9)))
    prompt, response = np.array([1, 2, 3, 3], np.int32), np.array([4, 4, 9, 5], np.int32)
    host = torch.randn(64, generator=torch.Generator().manual_seed(1))
    device = host.cuda()
    for logits in (host, device):
        edits.edit(logits, prompt, response)
        assert torch.isinf(logits[[7, 9]]).all()
    assert torch.allclose(device.cpu(), host, atol=1e-6)
    for logits in (host, device):
        edits.truncate(logits)
    assert torch.equal(device.cpu().isinf(), host.isinf())
    assert 1 < int(host.isfinite().sum()) < 62
