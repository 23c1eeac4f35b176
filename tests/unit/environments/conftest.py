"""A tokenizer with a chat template, as a checkpoint."""

import pytest

from tests.example_templates import byte_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer("qwen3").save_pretrained(directory)
    return str(directory)
