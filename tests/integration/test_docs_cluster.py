"""The documentation's blocks that need a cluster run after those that need none, each page in a program of its own."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.warm_programs import WarmPrograms

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if "```python cluster" in page.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_cluster_blocks_run(warm: WarmPrograms, page: Path, tmp_path: Path):
    program = tmp_path / "blocks.py"
    program.write_text(
        "\n".join(re.findall(r"^```python (?:runnable|cluster)\n(.*?)^```$", page.read_text(), re.M | re.S))
    )
    done = subprocess.run(
        [*warm.command, str(program)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | warm.environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
