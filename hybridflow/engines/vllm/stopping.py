"""What ends a response: stop tokens from the checkpoint's configuration, stop strings through its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.data.tokenizer import has_tokenizer, load_tokenizer
from hybridflow.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer


def stop_token_ids(checkpoint: Path) -> list[int]:
    """End-of-sequence ids of `generation_config.json`, or of `config.json` where that says nothing. Ascending."""
    for name in ("generation_config.json", "config.json"):
        path = checkpoint / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return sorted({found} if isinstance(found, int) else set(found))
    return []


class StopStrings:
    """Finds stop strings in what is being drawn. The tokenizer is loaded at the first use."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._tokenizer: Any = None

    def watch(self, request: EngineCoreRequest) -> IncrementalDetokenizer:
        """Its `update(new_token_ids, False)` returns the stop string that was completed, or None."""
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        return IncrementalDetokenizer.from_new_request(self._load(), request)

    def _load(self) -> Any:
        if self._tokenizer is None:
            if not has_tokenizer(self.checkpoint):
                raise ConfigError(
                    f"Sampling(stop=...) needs a tokenizer to see text, {self.checkpoint} has none. Save one there, or "
                    "end responses by the model's stop token."
                )
            self._tokenizer = load_tokenizer(self.checkpoint).raw
        return self._tokenizer
