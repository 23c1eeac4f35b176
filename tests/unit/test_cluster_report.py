"""What `hybridflow doctor --cluster` asks of each machine; real clusters are in tests/multinode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridflow.cli import cluster_report
from hybridflow.cli.cluster_report import Probe
from hybridflow.cli.commands import main
from hybridflow.cli.doctor import Finding


def test_ports_that_are_closed_are_named():
    one, other = Probe(), Probe()
    open_port = one.listen("127.0.0.1")
    closed = other.listen("127.0.0.1")
    other._server.close()
    others = [("a", "127.0.0.1", open_port), ("b", "127.0.0.1", closed), ("self", "127.0.0.2", closed)]
    (found,) = Probe().reach("127.0.0.2", others)
    assert found.startswith(f"none to b (127.0.0.1:{closed})")


def test_a_directory_without_the_drivers_file(tmp_path):
    assert "No such file" in Probe().meet("10.0.0.2", str(tmp_path), "word")
    (tmp_path / "word").write_text("word")
    assert Probe().meet("10.0.0.2", str(tmp_path), "word") == ""
    assert (tmp_path / "10.0.0.2").read_text() == "word"


def test_other_versions_are_named(monkeypatch):
    own = Finding("versions", "Python 3.11.7, torch 2.13.0, ray 2.60.0")
    monkeypatch.setattr(cluster_report, "_versions", lambda: own)
    assert list(cluster_report._compared([own])) == [own]
    (found,) = cluster_report._compared([replace(own, found="Python 3.11.7, torch 2.12.0, ray 2.60.0")])
    assert found.cure == "It has torch 2.12.0, unlike this machine: install the same versions everywhere."
    (found,) = cluster_report._compared([replace(own, found="Python 3.11.7, torch 2.13.0")])
    assert "not ray 2.60.0" in found.cure


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shared", "."], "is what the machines of a --cluster have in common"),
        (["--cluster", "."], "a model's directory or at a --cluster"),
        (["--cluster", "--shared", "/no/such"], "/no/such is no directory on this machine"),
        (["--cluster"], "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_wrong_commands(words, said, capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err
