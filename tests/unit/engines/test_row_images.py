"""Images of prompts for generation: what is too large for it."""

from __future__ import annotations

import pytest
import torch

from hybridflow.engines.vllm.row_images import RowImages, check_prompt
from hybridflow.errors import PromptError
from hybridflow.models.hf_spec import TransformersSpec
from tests.vision_models import IMAGE, sizes


def test_an_image_beyond_what_generation_has_memory_for_is_refused():
    spec = TransformersSpec.of(sizes("qwen3_vl"))
    assert spec.images is not None
    grids = torch.tensor([[1, 256, 256], [1, 256, 258]])
    one = RowImages([torch.empty(256 * 256, spec.images.patch)], grids[:1], ["one"])
    check_prompt(0, [IMAGE] * 16384, one, spec, 16384)
    both = RowImages(
        [*torch.empty(256 * 514, spec.images.patch).split([256 * 256, 256 * 258])], grids, ["one", "other"]
    )
    with pytest.raises(PromptError, match=r"prompt 0 has an image of 16512 tokens, .*\(image_tokens=16384\)"):
        check_prompt(0, [IMAGE] * (16384 + 16512), both, spec, 16384)
