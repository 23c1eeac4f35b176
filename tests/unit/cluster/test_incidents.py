"""Incidents: files about them where there is no run directory."""

from __future__ import annotations

import os
import time

from hybridflow.cluster.incidents import Incidents


def test_stacks_without_a_run_directory_are_kept_for_a_day(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with Incidents()._new_file("stacks-a") as first, Incidents()._new_file("stacks-a") as second:
        assert first.name != second.name
    (private,) = tmp_path.iterdir()
    assert private.stat().st_mode & 0o77 == 0
    os.utime(first.name, (0, time.time() - 90000))
    with Incidents()._new_file("stacks-b") as third:
        pass
    assert {path.name for path in (private / "stacks").iterdir()} == {
        os.path.basename(file.name) for file in (second, third)
    }
