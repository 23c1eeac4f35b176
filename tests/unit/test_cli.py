"""The command line and `hf.auto`: what they say of a driver, and of what cannot be planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hybridflow as hf
from hybridflow.cli import commands as cli
from hybridflow.cli import launch
from hybridflow.errors import ConfigError, PlacementError
from hybridflow.placement import Placement
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.tracing.auto import workload_of
from hybridflow.tracing.trace import Trace, trace_driver
from tests.contracts.family_cases import config

ROOT = Path(__file__).resolve().parents[2]
LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
DRIVER = '''
"""A driver of one's own: GRPO without a reference, and a command line of its own."""
import sys
import hybridflow as hf
from beside import PROMPTS


def main(arguments):
    settings = dict(a.split("=") for a in arguments)
    pool = hf.ResourcePool([8])
    generate = hf.VLLM(sampling=hf.Sampling(max_tokens=256))
    actor = hf.ActorWorker.on(pool, model=settings["model"], optim=hf.Adam(lr=1e-6), generate=generate)
    reward = hf.RewardWorker.on(pool, function=lambda completions: [1.0] * len(completions))
    for batch in hf.PromptLoader(PROMPTS, batch_size=32):
        batch = actor.generate_sequences(batch, n=4)
        batch |= reward.compute_reward(batch)
        batch |= actor.compute_log_prob(batch)
        batch |= hf.compute_advantage(batch, "grpo")
        actor.update_actor(batch, minibatches=int(settings.get("minibatches", 1)))


def nothing():
    sys.exit("no loop here")


if __name__ == "__main__":
    main(sys.argv[1:])
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver, prompts in a module beside it, and a model that is a configuration and nothing else."""
    home = tmp_path_factory.mktemp("driver")
    (home / "driver.py").write_text(DRIVER)
    (home / "beside.py").write_text("PROMPTS = [{'prompt': 'one two three four'}] * 64\n")
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(LLAMA_7B))
    return home


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command line says to these arguments."""
    assert cli.main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    err = err.removeprefix("searching for up to 10 s (--budget)\n")
    assert err.count("\n") == 1, "one line says it"
    return err


def test_what_cannot_be_planned(home: Path, capsys: pytest.CaptureFixture[str]):
    driver, model = f"{home}/driver.py", f"model={home}/nowhere/model"
    planned = (driver, "--cluster", "a100:1x8", model, "actor.model=llama3-7b")
    for expected, *arguments in (
        ("no driver nowhere.py", "nowhere.py", "--cluster", "a100:1x8"),
        ("has no function 'man'", f"{driver}:man", "--cluster", "a100:1x8"),
        ("ended before its loop: no loop here", f"{driver}:nothing", "--cluster", "a100:1x8"),
        ("no group 'critic'", driver, "--cluster", "a100:1x8", model, "critic.model=llama3-7b"),
        ("llama3-7b", driver, "--cluster", "a100:1x8", model, "actor.model=llama4-7b"),
        ("unknown", driver, "--cluster", "b100:1x8", model, "actor.model=llama3-7b"),
        ("a100", driver, "--cluster", "a100:0x8", model, "actor.model=llama3-7b"),
        ("actor.model=: give a model", driver, "--cluster", "a100:1x8", model, "actor.model="),
        ("counts down", driver, "--cluster", "a100:1x8", model, "--pin", "actor=5-3"),
        ("give devices", driver, "--cluster", "a100:1x8", model, "--pin", "actor=x"),
        ("nothing to share", *planned, "--pin", "actor=1-1-8-ep2"),
        ("can wait in host memory", *planned, "--pin", "actor=offload"),
        ("GROUP=VALUE", driver, "--cluster", "a100:1x8", model, "--cap", "8"),
        ("whole number", driver, "--cluster", "a100:1x8", model, "--cap", "actor=x"),
        ("two groups", driver, "--cluster", "a100:1x8", model, "--apart", "actor"),
        ("multiple", *planned, "--rows", "127"),
    ):
        assert expected in refused(capsys, *arguments), expected


def test_options_that_do_not_exist(home: Path, capsys: pytest.CaptureFixture[str]):
    for arguments in (["plan", f"{home}/driver.py", "--cluster", "a100:1x8", "--rwos", "3"], ["plan"], ["plna"]):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 2
    assert "--rwos" in capsys.readouterr().err


def test_a_driver_runs_as_a_program_or_as_one_of_its_functions(tmp_path: Path):
    path = tmp_path / "driver.py"
    path.write_text(
        "import sys\nargs = sys.argv[1:]\ndef other(given): sys.exit(f'other {given}')\n"
        "def silent(): sys.exit(f'silent {args}')\ndef two(a, b): pass\n"
        "if __name__ == '__main__': sys.exit(f'program {args}')\n"
    )
    before = list(sys.argv), list(sys.path)
    for name, expected in ((str(path), "program"), (f"{path}:other", "other"), (f"{path}:silent", "silent")):
        with pytest.raises(ConfigError, match=rf"{expected} \['a=1', 'b=2'\]"):
            launch.load_driver(name, ["a=1", "b=2"])()
    with pytest.raises(ConfigError, match="takes a, b"):
        launch.load_driver(f"{path}:two", [])()
    assert (sys.argv, sys.path) == before
    path.write_text("import sys\nsys.exit(0)\n")
    launch.load_driver(str(path), [])()
    with pytest.raises(ConfigError, match="no driver"):
        launch.load_driver(str(tmp_path / "none.py"), [])


def test_what_a_driver_raises_is_told_by_its_own_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "driver.py"
    for source, *expected in (
        ("import json\ndef main():\n    json.loads('{')\nmain()\n", "JSONDecodeError", "line 3, in main"),
        ("def main(:\n", "SyntaxError", "line 1"),
        ("import hybridflow as hf\nhf.ResourcePool(0)\n", "hybridflow: ", f"{path}, line 2"),
    ):
        path.write_text(source)
        assert cli.main(["plan", str(path), "--cluster", "a100:1x8"]) == 2
        said = capsys.readouterr().err
        assert all(text in said for text in expected), said
        assert "hybridflow/" not in said, "no line of ours"
    path.write_text("raise KeyboardInterrupt\n")
    assert cli.main(["plan", str(path), "--cluster", "a100:1x8"]) == 130


def test_options_behind_two_dashes_are_the_drivers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "driver.py").write_text("import sys\nsys.exit(str(sys.argv[1:]))\n")
    assert cli.main(["plan", f"{tmp_path}/driver.py", "--cluster", "a100:1x8", "a=1", "--", "--lr", "2"]) == 2
    assert "['a=1', '--lr', '2']" in capsys.readouterr().err


def test_files_that_cannot_be_written_are_refused_before_the_search(home: Path, capsys: pytest.CaptureFixture[str]):
    for option in ("--save", "--chart"):
        for target in (f"{home}/nowhere/plan", str(home)):
            assert "cannot be written" in refused(capsys, f"{home}/driver.py", "--cluster", "a100:1x8", option, target)
    assert cli.main(["profile", f"{home}/model", "--save", str(home)]) == 2


def test_the_command_is_quick_to_say_what_it_can():
    done = subprocess.run(
        [sys.executable, "-m", "hybridflow", "plan", "--help"], capture_output=True, text=True, cwd=ROOT, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "--cluster" in done.stdout
    assert "actor.model=" in done.stdout


def test_a_plan_on_the_command_line(home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    saved, drawn = tmp_path / "plan.yaml", tmp_path / "plan.png"
    search = ["--cluster", "a100:1x4", "--budget", "0.5", "--one-layout", "--rows", "256", "--prompt", "100:200"]
    options = ["--save", str(saved), "--chart", str(drawn), "--pin", "actor=0-3", "--apart", "actor,reward"]
    # the driver's own model is a configuration without weights or tokenizer; settings may stand on either side
    arguments = ["plan", f"{home}/driver.py", "minibatches=2", *search, *options[:4], f"model={home}/model"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.count("Plain placement (all groups on all 4 devices, tp=") == 1
    for expected in ("s per iteration on a100:1x4", "actor.update_actor", "reward.compute_reward", "(p-t-d)"):
        assert expected in text
    assert text.count("faster than the heuristic (tp=") == 2, "in the answer and in its explanation"
    loops = [line.partition(" ")[0] for line in text.splitlines()[-5:]]
    assert loops == ["colocated", "split", "streamed", "elastic", "fastest:"]
    placement = Placement.load(saved)
    assert str(placement) in text
    assert placement.groups["actor"].train is not None
    assert placement.groups["actor"].generate is not None
    assert placement.groups["reward"].train is None
    assert drawn.read_bytes().startswith(b"\x89PNG")
    larger = ["actor.model=llama3-13b", "model=nowhere", "--quiet", "--cluster", "a100:2x4"]
    assert cli.main([*arguments[:-1], *larger]) == 0
    assert "(p-t-d) on devices" not in capsys.readouterr().out
    assert Placement.load(saved).nodes == (4, 4)
    pinned = ["plan", f"{home}/driver.py", *search, *options, f"model={home}/model"]
    assert cli.main(pinned) == 2
    assert "Apart(actor, reward)" in capsys.readouterr().err, "four devices are all the actor's"


def test_a_cluster_that_is_too_small(home: Path, capsys: pytest.CaptureFixture[str]):
    said = refused(capsys, f"{home}/driver.py", "--cluster", "a100:1x1", f"model={home}/model")
    assert "too small" in said
    assert "actor" in said
    assert "a100:2x1" in said.partition("The smallest cluster")[2]


def test_an_estimate_names_every_call(home: Path, capsys: pytest.CaptureFixture[str]):
    asked = ["estimate", f"{home}/driver.py", "--cluster", "a100:1x2", "--rows", "16", f"model={home}/model"]
    assert cli.main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    calls = {line.partition(" ")[0].rstrip(":"): line for line in lines}
    assert "generation is not run" in calls["actor.generate_sequences"]
    assert "a function" in calls["reward.compute_reward"]
    for part in ("(1-1-2 on 0-1, rank 0): ", "parameters ", "gradients ", "optimizer ", "(planner: ", " FLOP; "):
        assert part in calls["actor.update_actor"]


def test_an_estimate_runs_a_mixture_of_experts(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config("qwen3_moe").save_pretrained(tmp_path)
    asked = ["estimate", f"{home}/driver.py", "--cluster", "a100:1x2", f"model={home}/model", f"actor.model={tmp_path}"]
    assert cli.main(asked) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("actor.update_actor")]
    assert "activations and buffers" in line


def traced(home: Path) -> Trace:
    return trace_driver(launch.load_driver(f"{home}/driver.py", [f"model={home}/model", "minibatches=2"]))


def test_the_workload_is_the_drivers_where_it_is_not_given(home: Path):
    found, cluster = traced(home), ClusterSpec.of("a100:1x8")
    own = workload_of(found, None, cluster)
    assert (own.rows, own.responses_per_prompt, own.dtype) == (128, 4, "bfloat16")
    assert own.prompt.mean == len("one two three four") // 4, "four characters are about a token"
    assert (own.response.mean, own.response.max) == (256, 256)
    assert workload_of(found, 512, cluster).rows == 512
    some = workload_of(found, {"response": (100, 256), "recompute": True}, cluster)
    assert (some.rows, some.response.mean, some.recompute) == (128, 100, True)
    assert workload_of(found, some, cluster) is some
    assert workload_of(found, None, ClusterSpec.this_machine(2)).dtype == "float32"
    with pytest.raises(ConfigError, match="Did you mean 'response'"):
        workload_of(found, {"responses": 3}, cluster)


def test_auto_plans_what_it_runs(home: Path):
    ran = []

    @hf.auto(cluster="a100:1x2", budget_s=0.2)
    def driver(rows: int, n: int = 1) -> int:
        """Of the user."""
        pool = hf.ResourcePool([8])
        actor = hf.ActorWorker.on(pool, model="llama3-7b", generate=hf.VLLM())
        reward = hf.RewardWorker.on(pool, function=lambda completions: [1.0] * len(completions))
        for batch in hf.PromptLoader([{"prompt": "one"}] * 64, batch_size=rows):
            batch = actor.generate_sequences(batch, n=n)
            reward.compute_reward(batch)
            ran.append(len(batch))
        return rows

    assert driver.__doc__ == "Of the user."
    placement = driver.plan(16)
    assert set(ran) == {16}
    assert list(placement.calls) == ["actor.generate_sequences", "reward.compute_reward"]
    assert placement.calls["actor.generate_sequences"].devices == placement.groups["actor"].devices
    assert placement.cluster == "a100:1x2"
    assert driver.plan(16, cluster="h100:1x2").seconds < placement.seconds
    assert driver.plan(16, workload=256).seconds > placement.seconds
    assert trace_driver(driver, 8, 2).rows == 16, "a trace of it does not plan again"


def test_auto_on_methods_and_with_named_arguments():
    class Run:
        rows = 16

        @hf.auto(cluster="a100:1x2", budget_s=0.2)
        def driver(self, *, n: int = 1) -> int:
            pool = hf.ResourcePool([8])
            actor = hf.ActorWorker.on(pool, model="llama3-7b", generate=hf.VLLM())
            for batch in hf.PromptLoader([{"prompt": "one"}] * 64, batch_size=self.rows):
                actor.generate_sequences(batch, n=n)
            return n

    few, many = Run().driver.plan(n=1), Run().driver.plan(n=64, cluster="a100:1x2")
    assert few.seconds < many.seconds
    with pytest.raises(ConfigError, match="Did you mean 'budget_s'"):
        hf.auto(budget=3)


def test_auto_plans_elastic_iterations():
    @hf.auto(cluster="a100:1x2", workload={"response": (300, 4000)})
    def driver(*, rows: int) -> None:
        pool = hf.ResourcePool([8])
        actor = hf.ActorWorker.on(pool, model="llama3-7b", optim=hf.Adam(lr=1e-6), generate=hf.VLLM())
        reward = hf.RewardWorker.on(pool, function=lambda completions: [1.0] * len(completions))
        for batch in hf.PromptLoader([{"prompt": "one"}] * 64, batch_size=rows):
            batch = actor.generate_sequences(batch, n=4)
            batch |= actor.compute_log_prob(batch)
            batch |= reward.compute_reward(batch)
            batch |= hf.compute_advantage(batch, "grpo")
            actor.update_actor(batch)

    found = driver.plan_elastic(rows=16, cluster="a100:1x8", minibatches=2, policy="static")
    assert (found.run.prompts, found.run.n, found.run.minibatches) == (16, 4, 2)
    assert found.elastic == found.static
    faster = driver.plan_elastic(rows=16, cluster="h100:1x8", minibatches=2, policy="static")
    assert faster.static < found.static
    long = driver.plan_elastic(rows=16, cluster="a100:1x8", policy="static", workload={"response": (8000, 30000)})
    assert long.train.t == 4  # with activations that are computed again
    with pytest.raises(PlacementError, match="more than the 2 devices"):
        driver.plan_elastic(rows=16)


def test_groups_that_generate_are_apart():
    """A host holds one vLLM engine."""

    def driver() -> None:
        pool = hf.ResourcePool([8])
        actors = [hf.ActorWorker.on(pool, name=name, model="llama3-7b", generate=hf.VLLM()) for name in "ab"]
        for batch in hf.PromptLoader([{"prompt": "one"}] * 64, batch_size=16):
            for actor in actors:
                actor.generate_sequences(batch)

    placement = hf.auto(driver, cluster="a100:1x2", budget_s=0.2).plan()
    assert not set(placement["a"].devices) & set(placement["b"].devices)


def test_auto_with_a_placement_searches_nothing(tmp_path: Path):
    Placement((2,)).save(tmp_path / "plan.yaml")
    assert hf.auto(lambda: 3, placement=tmp_path / "plan.yaml")() == 3
    with pytest.raises(ConfigError, match="searches nothing"):
        hf.auto(placement=Placement((2,)), workload=4)
    with pytest.raises(PlacementError, match="no placement file"):
        hf.auto(placement=tmp_path / "none.yaml")
