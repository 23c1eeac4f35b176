"""The documentation's blocks of workers, losses and rewards run where there are GPUs, too, as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="pages ask for two devices")]


def test_blocks_of_a_page_run_on_devices(tmp_path: Path):
    page = ROOT / "docs" / "writing_your_own.md"
    blocks = re.findall(r"^```python (?:runnable|cluster)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    program = tmp_path / "blocks.py"
    program.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
