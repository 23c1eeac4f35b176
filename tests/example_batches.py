"""A batch with every kind of column, for tests of batches."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged


def make(rows: int, seed: int = 0) -> Batch:
    """Every kind of column, with empty ragged rows among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (rows,), generator=generator)
    total = int(lengths.sum())
    return Batch(
        {
            "row_id": torch.arange(rows),
            "response_ids": Ragged.from_lengths(torch.randint(0, 99, (total,), generator=generator), lengths),
            "log_probs": Ragged.from_lengths(torch.rand(total, generator=generator), lengths),
            "mask": Ragged.from_lengths(torch.rand(total, generator=generator) > 0.5, lengths),
            "hidden": torch.rand(rows, 3, generator=generator).to(torch.bfloat16),
            "reward": torch.rand(rows, generator=generator),
            "answer": [f"<{i}>" if i % 3 else None for i in range(rows)],
        }
    )


batches = st.builds(make, st.integers(0, 20), st.integers(0, 2**16))
quick = settings(max_examples=40, deadline=None)
