"""Traces: the graphs of the shipped recipes and of loops of one's own, without processes, devices or weights."""

from __future__ import annotations

import importlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import hybridflow as hf
from benchmarks.dataflows import grpo, ppo
from hybridflow.batch.batch import Batch
from hybridflow.cluster.session import Session
from hybridflow.errors import CheckpointError, ConfigError, MissingColumnError, PlacementError
from hybridflow.models.hf_spec import read_spec
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import Graph, GraphBuilder
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.model_sizes import Sizes
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.search.call_search import Evaluator, options_of
from hybridflow.planner.search.planning import plan
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import THREE_D_PROTO
from hybridflow.tracing.trace import PUBLISHED, Trace, check_driver, model_spec, trace_driver
from recipes.arithmetic import Arithmetic
from recipes.small_model import SmallModel
from tests.tiny_models import make_policy

ACTOR: dict[str, Any] = {"optim": hf.Adam(lr=1e-6), "generate": hf.VLLM(sampling=hf.Sampling(max_tokens=8))}
TOKENS = "prompt_ids response_ids"
GENERATE, OLD, UPDATE = "actor.generate_sequences", "actor.compute_log_prob", "actor.update_actor"
REF = "reference.compute_ref_log_prob"
ADVANTAGE, REWARD = "hybridflow.compute_advantage", "reward.compute_reward"
ROWS_ONLY = {"num_tokens", "temperature"}  # beside the data: how rows are spread, what logits are divided by


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights, with a tokenizer, and prompts for it."""
    home = tmp_path_factory.mktemp("small")
    SmallModel(steps=0).write(home / "model", lambda rng: ("1+1=", "2"))
    (home / "model" / "model.safetensors").unlink()
    train, _ = Arithmetic().problems()
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in train[:200]]
    (home / "train.jsonl").write_text("\n".join(lines))
    return home


def traced(recipe: str, small: Path, *arguments: str, **models: Any) -> Trace:
    main = importlib.import_module(f"recipes.{recipe}").main
    return trace_driver(main, [f"model={small}/model", f"prompts={small}/train.jsonl", *arguments], models=models)


def data(graph: Graph, target: str) -> dict[str, str]:
    """What a call waits for: source -> columns."""
    edges = [edge for edge in graph.into(target) if edge.kind == "data"]
    assert all(edge.distance == 0 for edge in edges)
    return {edge.source: " ".join(c for c in edge.columns if c not in ROWS_ONLY) for edge in edges}


def versions(graph: Graph) -> set[tuple[str, str, int]]:
    """(who stepped, who uses it, distance)."""
    return {(edge.source, edge.target, edge.distance) for edge in graph.edges if edge.kind == "parameters"}


def kinds(graph: Graph) -> dict[str, str]:
    return {call.name: call.kind for call in graph.calls}


TEXTS = "prompt_ids response_ids response_mask"
FIRST = {GENERATE: {}, REWARD: {GENERATE: "response"}, OLD: {GENERATE: TOKENS}}
COMMON = {**FIRST, REF: {GENERATE: TOKENS}}
SCORED = {REWARD: "rewards", GENERATE: "response_mask"}
PENALTY = {OLD: "old_log_probs", REF: "ref_log_probs"}
LEARN = {UPDATE: {GENERATE: TEXTS, OLD: "old_log_probs", ADVANTAGE: "advantages"}}


def valued(critic: str, values: str, returns: str) -> dict[str, dict[str, str]]:
    return {
        f"{critic}.compute_values": {GENERATE: TOKENS},
        f"{critic}.update_critic": {GENERATE: TEXTS, f"{critic}.compute_values": values, ADVANTAGE: returns},
    }


AGAIN = f"{GENERATE}#2"  # which is trained, the first one is its baseline
EXPECTED: dict[str, dict[str, dict[str, str]]] = {
    "ppo": {
        **(COMMON | valued("critic", "values", "returns") | LEARN),
        ADVANTAGE: {**SCORED, **PENALTY, "critic.compute_values": "values"},
    },
    "grpo": {**COMMON, ADVANTAGE: SCORED, UPDATE: {**LEARN[UPDATE], REF: "ref_log_probs"}},
    "remax": {
        GENERATE: {},
        REWARD: {GENERATE: "response"},
        AGAIN: {},
        f"{REWARD}#2": {AGAIN: "response"},
        OLD: {AGAIN: TOKENS},
        REF: {AGAIN: TOKENS},
        ADVANTAGE: {f"{REWARD}#2": "rewards", REWARD: "baseline", AGAIN: "response_mask", **PENALTY},
        UPDATE: {AGAIN: TEXTS, OLD: "old_log_probs", ADVANTAGE: "advantages"},
    },
    "safe_rlhf": {
        **(COMMON | valued("critic", "values", "returns") | valued("critic_2", "cost_values", "cost_returns") | LEARN),
        "cost.compute_cost": {GENERATE: "response"},
        ADVANTAGE: {
            **SCORED,
            **PENALTY,
            "cost.compute_cost": "costs",
            "critic.compute_values": "values",
            "critic_2.compute_values": "cost_values",
        },
        f"{UPDATE}#2": {},  # of texts that the loader brought
    },
    "rloo": {**COMMON, ADVANTAGE: {**SCORED, **PENALTY}, **LEARN},
    "dapo": {**FIRST, REWARD: {GENERATE: "response response_ids"}, ADVANTAGE: SCORED, **LEARN},
    "gspo": {**FIRST, ADVANTAGE: SCORED, **LEARN},
}
EXPECTED["reinforce_plus_plus"] = EXPECTED["rloo"]


@pytest.mark.parametrize("recipe", EXPECTED)
def test_graph_of_a_recipe(recipe: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    before = Session.existing(), ray.is_initialized()
    found = traced(recipe, small)
    graph = found.graph
    assert {call.name: data(graph, call.name) for call in graph.calls} == EXPECTED[recipe]
    steps = {"actor": f"{UPDATE}#2" if recipe == "safe_rlhf" else UPDATE}
    steps |= {name: f"{name}.update_critic" for name in graph.groups if name.startswith("critic")}
    last = {(steps[call.group], call.name, 1) for call in graph.calls if call.group in steps}
    if recipe == "safe_rlhf":  # the second update steps what the first has stepped
        last = last - {(f"{UPDATE}#2", f"{UPDATE}#2", 1)} | {(UPDATE, f"{UPDATE}#2", 0)}
    assert versions(graph) == last
    reads = {(REWARD, OLD)} if recipe == "dapo" else set()  # the sampler reads which groups differ
    assert {(edge.source, edge.target) for edge in graph.edges if edge.kind == "driver"} == reads
    assert graph.trained == frozenset(steps)
    assert found.rows == 256
    assert all(call.rows == 1.0 for call in graph.calls)
    assert {call.minibatches for call in graph.calls if call.kind == "training"} <= {4, 1}
    assert (Session.existing(), ray.is_initialized()) == before
    assert list(tmp_path.iterdir()) == [], "a trace leaves files"


def test_kinds_and_models(small: Path):
    found = traced("ppo", small, f"reward={small}/model", "epochs=3", "minibatches=4")
    graph = found.graph
    assert kinds(graph)[GENERATE] == "generation"
    assert kinds(graph)[REWARD] == "inference", "a reward model is a model"
    assert kinds(graph)[UPDATE] == "training"
    assert kinds(graph)[ADVANTAGE] == "function"
    assert (graph.call(UPDATE).minibatches, graph.call(UPDATE).epochs) == (4, 3)
    heads = {name: spec.head for name, spec in graph.models.items() if spec}
    assert heads == {"actor": "lm", "reference": "lm", "critic": "value", "reward": "value"}
    assert graph.groups == ("actor", "reference", "critic", "reward")
    assert graph.offload == {"reference": False, "critic": False, "reward": False}
    assert kinds(traced("ppo", small).graph)[REWARD] == "function"


def test_models_instead_of_those_of_the_driver(small: Path):
    graph = traced("ppo", small, actor="llama3-70b", critic=PUBLISHED["llama3-7b"]).graph
    actor, critic, reference = (graph.models[name] for name in ("actor", "critic", "reference"))
    assert actor == reference == PUBLISHED["llama3-70b"], "the reference shares the actor's checkpoint"
    assert critic == replace(PUBLISHED["llama3-7b"], head="value")
    assert traced("ppo", small, critic=PUBLISHED["llama3-7b"], actor="llama3-70b").graph.models == graph.models
    with pytest.raises(ConfigError, match="no group 'critik'"):
        traced("ppo", small, critik="llama3-7b")


def test_families_that_only_transformers_describes(small: Path, tmp_path: Path):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 32, "vocab_size": 61, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(mixture))
    graph = traced("grpo", small, actor=str(tmp_path)).graph
    assert Sizes.of(graph.models["actor"]).experts == 4
    placed = plan(graph, "a100:1x2", Workload(rows=8, prompt=16, response=16), budget_s=2)
    assert placed["actor"].train is not None


def test_columns_between_groups_take_their_bytes(small: Path):
    """A row of 1,000 + 1,000 tokens has ids of 8 bytes each, and further numbers."""
    graph = traced("grpo", small).graph
    assert graph.widths["prompt_ids"] == (8, 0, 0)
    assert graph.widths["response_mask"] == (0, 1, 0)
    assert graph.widths["rewards"] == (0, 0, 4)
    model, work = PUBLISHED["llama3-7b"], Workload(rows=1000, prompt=1000, response=1000)
    graph = replace(graph, models=dict.fromkeys(("actor", "reference"), model) | {"reward": None})
    costs = Costs(ClusterSpec.of("a100:2x8"), graph, work)
    near, far = (Mesh.of(0, 8), Mesh.of(8, 8))
    at = {call.name: CallPlan(near, Parallel(d=8)) for call in costs.calls}
    moved = at | {REF: CallPlan(far, Parallel(d=8))}
    host, network = costs.cluster.node.device.host, costs.cluster.bandwidth * costs.coefficients.network
    nbytes = 1000 * 1000 * (8 + 8) + 1000 * sum(graph.widths[name].row for name in ROWS_ONLY & {*graph.call(REF).reads})
    bare = Costs(costs.cluster, replace(graph, widths={}), work)
    for plans, rate in ((at, host), (moved, network)):
        more = costs.seconds(plans)[REF] - bare.seconds(plans)[REF]
        assert more == pytest.approx(nbytes / rate, rel=1e-3)
    evaluator = Evaluator(costs, options_of(costs, also=[moved]))
    assert (state := evaluator.state(moved)) is not None
    assert (score := evaluator.score(state)) is not None
    assert score.seconds == pytest.approx(costs.timeline(moved).per_iteration)


def test_published_sizes():
    found = {name: round(spec.num_parameters / 1e9, 2) for name, spec in PUBLISHED.items()}
    assert found == {"llama3-7b": 8.03, "llama3-13b": 14.0, "llama3-34b": 35.32, "llama3-70b": 70.55}


def test_what_is_no_model(tmp_path: Path):
    (tmp_path / "config.json").write_text("{]")
    for source, message in ((tmp_path, "no configuration"), ("./nowhere", "does not exist"), ("llama9", "llama3-7b")):
        with pytest.raises(CheckpointError, match=message):
            model_spec(source)


# Loops of one's own


class Teacher(hf.Worker):
    """A user's worker: scores texts with a model of its own, and learns from them."""

    role = "teacher"

    def __init__(self, model: str | None = None) -> None:
        self.model = model

    @classmethod
    def worker_spec(cls, settings: Any) -> hf.WorkerSpec:
        return hf.WorkerSpec(model=lambda: model_spec(settings["model"]))

    @register(THREE_D_PROTO, reads=("response_ids", "hint?"), writes=("marks",))
    def mark(self, batch: Batch) -> Batch:
        raise AssertionError("a trace calls nothing")

    @register(THREE_D_PROTO, reads=("marks",), kind="training")
    def learn(self, batch: Batch) -> dict[str, float]:
        raise AssertionError("a trace calls nothing")


def groups(small: Path) -> dict[str, Any]:
    model = small / "model"
    train = {"model": model, "optim": hf.Adam(lr=1e-5)}
    return {
        "actor": hf.trace_spec(hf.ActorWorker, generate=hf.VLLM(sampling=hf.Sampling(max_tokens=7)), **train),
        "rollout": hf.trace_spec(hf.RolloutWorker, model=model, generate=hf.VLLM(sampling=hf.Sampling(max_tokens=7))),
        "teacher": hf.trace_spec(Teacher, model="llama3-7b"),
        "reward": hf.trace_spec(hf.RewardWorker, function=lambda completions: [1.0] * len(completions)),
    }


def test_a_loop_of_ones_own(small: Path):
    """Generation elsewhere, a step behind, with a teacher, a filter on figures, and groups of four."""
    kl, before = hf.algorithms.AdaptiveKL(0.1, target=0.1, horizon=100), []

    def step(prompts, actor, rollout, teacher, reward):
        batch = rollout.generate_sequences(prompts, n=4)
        batch |= reward.compute_reward(batch)
        marks = teacher.mark(batch)
        batch |= marks.rename(marks="ref_log_probs")
        before.append(batch)
        if len(before) < 2:
            return
        late = before.pop(0)
        late |= actor.compute_log_prob(late)
        late |= hf.compute_advantage(late, "rloo", kl_coef=kl)
        parts = late.split(2)
        figures = [actor.update_actor(part, minibatches=2) for part in parts]
        if figures[0].get()["actor/kl"] > 0.5:
            raise AssertionError("figures of a trace are 0")
        teacher.learn(marks)
        hf.sync_weights(actor, rollout)
        assert late.metrics().get() == {}

    graph = hf.trace(step, groups(small))
    draw, first, second = "rollout.generate_sequences", UPDATE, f"{UPDATE}#2"
    assert [call.name for call in graph.calls] == [
        *(draw, REWARD, "teacher.mark", OLD, ADVANTAGE, first, second, "teacher.learn")
    ]
    by = {(e.source, e.target, e.kind, e.distance): set(e.columns) - ROWS_ONLY for e in graph.edges}
    texts = set(TEXTS.split())
    assert by == {
        (draw, REWARD, "data", 0): {"response"},
        (draw, "teacher.mark", "data", 0): {"response_ids"},
        (draw, OLD, "data", 1): set(TOKENS.split()),
        (REWARD, ADVANTAGE, "data", 1): {"rewards"},
        (draw, ADVANTAGE, "data", 1): {"response_mask"},
        (OLD, ADVANTAGE, "data", 0): {"old_log_probs"},
        ("teacher.mark", ADVANTAGE, "data", 1): {"ref_log_probs"},
        **{(draw, part, "data", 1): texts for part in (first, second)},
        **{(OLD, part, "data", 0): {"old_log_probs"} for part in (first, second)},
        **{(ADVANTAGE, part, "data", 0): {"advantages"} for part in (first, second)},
        ("teacher.mark", "teacher.learn", "data", 0): {"marks"},
        (first, "teacher.learn", "driver", 0): set(),  # the driver reads its metrics
        **{(second, name, "parameters", 1): set() for name in (draw, OLD, first)},  # the draw by way of sync_weights
        (first, second, "parameters", 0): set(),
        **{("teacher.learn", name, "parameters", 1): set() for name in ("teacher.mark", "teacher.learn")},
    }
    assert {call.name: call.rows for call in graph.calls}[first] == 0.5
    assert graph.trained == {"actor", "teacher"}
    assert graph.models["teacher"] == PUBLISHED["llama3-7b"]


def test_a_column_that_nobody_has_written(small: Path):
    def step(prompts, actor):
        batch = actor.generate_sequences(prompts)
        actor.update_actor(batch)

    before = Session.existing()
    with pytest.raises(MissingColumnError, match=r"actor.update_actor reads 'old_log_probs'|reads 'advantages'"):
        hf.trace(step, {"actor": groups(small)["actor"]})
    assert Session.existing() is before


def test_groups_of_responses_that_were_not_drawn(small: Path):
    def step(prompts, actor, reward):
        batch = actor.generate_sequences(prompts)
        hf.compute_advantage(batch | reward.compute_reward(batch), "grpo")

    with pytest.raises(MissingColumnError, match=r"reads 'group_id'.*call generate_sequences\(batch, n=\.\.\.\)"):
        hf.trace(step, groups(small))


def test_models_that_are_names_are_taken_to_have_a_tokenizer(small: Path):
    def step(prompts, actor):
        batch = actor.generate_sequences(prompts, n=2)
        batch |= {"rewards": torch.tensor([float(len(text)) for text in batch["response"].get()])}
        batch |= actor.compute_log_prob(batch)
        batch |= hf.compute_advantage(batch, "grpo")
        actor.update_actor(batch)

    graph = hf.trace(step, {"actor": hf.trace_spec(hf.ActorWorker, **ACTOR, model="llama3-7b")})
    assert data(graph, ADVANTAGE) == {GENERATE: "response_mask"}, "the rewards are the driver's own"
    bare = small / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((small / "model" / "config.json").read_text())
    with pytest.raises(MissingColumnError, match="response"):
        hf.trace(step, {"actor": hf.trace_spec(hf.ActorWorker, **ACTOR, model=bare)})


@pytest.mark.parametrize("trained", [lambda i: i > 10, lambda i: i % 2, lambda i: i % 5 == 4])
def test_what_is_not_trained_at_first_or_every_time_is_seen(small: Path, trained: Any):
    """A critic is warmed up; an actor that is trained every other time."""
    steps = []

    def step(prompts, actor, critic):
        batch = actor.generate_sequences(prompts, n=2)
        batch |= actor.compute_log_prob(batch) | critic.compute_values(batch)
        batch |= {"rewards": torch.zeros(len(batch))}
        batch |= hf.compute_advantage(batch, "gae")
        critic.update_critic(batch)
        steps.append(None)
        if trained(len(steps)):
            actor.update_actor(batch)

    critic = hf.trace_spec(hf.CriticWorker, model="llama3-7b", optim=hf.Adam(lr=1e-6))
    graph = hf.trace(step, {"actor": hf.trace_spec(hf.ActorWorker, **ACTOR, model="llama3-7b"), "critic": critic})
    assert graph.trained == {"actor", "critic"}
    assert len(steps) < 20


def test_groups_that_are_trained_in_turns(small: Path):
    turns = itertools.cycle("ab")

    def step(prompts, a, b):
        mine = {"a": a, "b": b}[next(turns)]
        batch = mine.generate_sequences(prompts, n=2)
        batch |= mine.compute_log_prob(batch) | {"rewards": torch.zeros(len(batch))}
        mine.update_actor(batch | hf.compute_advantage(batch, "grpo"))

    graph = hf.trace(step, {name: hf.trace_spec(hf.ActorWorker, **ACTOR, model="llama3-7b") for name in "ab"})
    assert len(graph.trained) == 1


def test_groups_as_one_parameter_and_prompts_of_ones_own(small: Path):
    def step(groups, records):
        batch = groups.actor.generate_sequences(records)
        assert batch.get("answer")["answer"] == ["4"] * 3
        groups.reward.compute_reward(batch)

    graph = hf.trace(step, groups(small), prompts={"prompt": ["2+2="] * 3, "answer": ["4"] * 3})
    assert list(kinds(graph).values()) == ["generation", "function"]
    assert graph.trained == frozenset()


def test_what_teachers_write_takes_its_bytes(small: Path):
    def step(groups, records):
        batch = groups.actor.generate_sequences(records)
        top = groups.average.compute_ref_top_k(batch, k=16)
        groups.own.read(top | groups.average.compute_ref_hidden_states(batch))

    class Reads(hf.Worker):
        @hf.register(hf.DP_PROTO, reads=("ref_hidden_states", "ref_top_ids", "ref_top_log_probs"), kind="inference")
        def read(self, batch: hf.Batch) -> None: ...

    average = hf.trace_spec(hf.ReferenceWorker, model=small / "model")
    given = groups(small) | {"average": average, "own": hf.trace_spec(Reads)}
    graph = hf.trace(step, given, prompts={"prompt": ["2+2="] * 3})
    assert (model := graph.models["average"]) is not None
    assert graph.widths["ref_hidden_states"] == (0, 2 * model.hidden, 0)
    assert graph.widths["ref_top_ids"] == graph.widths["ref_top_log_probs"] == (0, 4 * 16, 0)
    assert graph.widths["ref_tail_log_probs"] == (0, 4, 0)


@pytest.mark.parametrize(("own", "kept"), [({"ema_decay": 0.9}, True), ({"ema_decay": 0.9, "offload": True}, False)])
def test_a_moving_average_on_the_devices_is_in_the_graph(small: Path, own: dict[str, Any], kept: bool):
    def step(groups, records):
        groups.average.compute_ref_log_prob(groups.actor.generate_sequences(records))

    average = hf.trace_spec(hf.ReferenceWorker, model=small / "model", **own)
    graph = hf.trace(step, groups(small) | {"average": average}, prompts={"prompt": ["2+2="] * 3})
    assert graph.averaged == (frozenset({"average"}) if kept else frozenset())
    assert graph.offload == {"average": not kept}  # and not the actor, which never waits as a whole


def test_loops_that_cannot_be_traced(small: Path):
    with pytest.raises(ConfigError, match=r"'aktor'.*Did you mean 'actor'"):
        hf.trace(lambda prompts, aktor: None, groups(small))
    with pytest.raises(ConfigError, match=r"hf\.trace_spec"):
        hf.trace(lambda prompts, actor: None, {"actor": "llama"})
    with pytest.raises(ConfigError, match="calls no group"):
        hf.trace(lambda prompts: None, groups(small))
    with pytest.raises(ConfigError, match="without a loop"):
        trace_driver(lambda: None)
    with pytest.raises(ConfigError, match=r"no processes.*'events'"):
        trace_driver(lambda: hf.ResourcePool(2).events())
    with pytest.raises(ConfigError, match="minibatches"):
        traced("ppo", small, "minibatches=500")


def test_a_driver_without_a_loader(small: Path):
    """Its iterations are those that its tracker logs."""
    done = []

    def driver():
        actor = hf.ActorWorker.on(hf.ResourcePool([2]), model=small / "model", generate=hf.VLLM(), optim=hf.SGD(lr=1.0))
        tracker = hf.Tracker("figures", to="wandb")  # a trace needs no logger
        while True:
            batch = actor.generate_sequences(hf.Batch({"prompt": ["1+1="] * 4}))
            batch |= actor.compute_log_prob(batch)
            batch |= {"advantages": batch["old_log_probs"].get()}
            tracker.log(actor.update_actor(batch), batch.metrics())
            done.append(actor.save("here"))

    found = trace_driver(driver)
    assert done[0].endswith("/here")
    assert list(kinds(found.graph)) == [GENERATE, OLD, UPDATE]
    assert data(found.graph, UPDATE) == {GENERATE: TEXTS, OLD: "old_log_probs"}
    assert found.sampled is not None
    assert (found.sampled.rows, found.sampled.factor, found.sampled.prompt_tokens) == (4, 1, (1,) * 4)
    assert not Path("figures").exists()


def test_a_loader_that_ends_and_what_comes_after(small: Path):
    def driver():
        actor = hf.ActorWorker.on(hf.ResourcePool(1), model=small / "model", generate=hf.VLLM(), optim=hf.SGD(lr=1.0))
        for prompts in hf.PromptLoader([{"prompt": "1+1="}] * 8, batch_size=8, steps=1):
            batch = actor.generate_sequences(prompts)
            batch |= actor.compute_log_prob(batch) | {"advantages": torch.zeros(8)}
            actor.update_actor(batch, loss=lambda outputs, rows, totals: (outputs["log_probs"].sum(), {}))
        actor.generate_sequences(hf.Batch({"prompt": ["1+1="]}))
        actor.close()
        hf.shutdown()

    graph = trace_driver(driver).graph
    assert list(kinds(graph)) == [GENERATE, OLD, UPDATE]
    assert versions(graph) == {(UPDATE, name, 1) for name in kinds(graph)}


@pytest.mark.parametrize("trace", [trace_driver, check_driver])
def test_what_outlives_a_run_is_neither_read_nor_written(trace: Any, tmp_path: Path):
    """Also by a loop that comes to its end, after which a run would be marked as ended."""
    before = Session.existing(), Session.replay
    (tmp_path / "home" / "kept").mkdir(parents=True)
    model, tmp_path = make_policy(tmp_path / "policy"), tmp_path / "home"

    def driver():
        hf.init(devices=2)
        pool = hf.ResourcePool([2])
        assert [device["memory"] for device in pool.devices()] == [None, None] or torch.cuda.is_available()
        generate = hf.VLLM(max_length=16, sampling=hf.Sampling(max_tokens=4))
        actor = hf.ActorWorker.on(pool, model=model, optim=hf.SGD(lr=1.0), generate=generate)
        critic = hf.CriticWorker.on(pool, model=model, optim=hf.SGD(lr=1.0))
        checkpoints = hf.Checkpoints(tmp_path / "kept", every=1, batches=True)
        tracker = hf.Tracker(tmp_path / "run", to=("tensorboard",))
        assert hf.load(tmp_path / "nowhere") == checkpoints.done == 0
        texts, ids = [{"prompt": "1"}] * 8, hf.Batch({"prompt_ids": [[1, 2]] * 8})
        loader = hf.PromptLoader(texts, batch_size=8, steps=1)
        for prompts in checkpoints.resume(loader):
            batch = actor.generate_sequences(ids | prompts)
            batch |= actor.compute_log_prob(batch) | critic.compute_values(batch)
            batch |= {"rewards": torch.zeros(8)}
            batch |= hf.compute_advantage(batch, "gae")
            one, other = hf.together(actor.update_actor(batch), critic.update_critic(batch))
            tracker.log(batch.metrics(), one, other)
            checkpoints.step(one)
            hf.save(tmp_path / "saved")
        assert checkpoints.done == 1
        hf.shutdown()
        hf.init()  # of the same trace
        ended.append(Session.current())

    ended: list[Session] = []
    trace(driver)
    assert ended or trace is check_driver
    assert (Session.existing(), Session.replay) == before
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]


def test_elastic_devices_are_traced_as_whole_iterations(small: Path):
    def driver():
        pool, model = hf.ResourcePool(4), small / "model"
        actor = hf.ActorWorker.on(pool[:1], model=model, optim=hf.SGD(lr=1.0), generate=None)
        rollout = hf.RolloutWorker.on(pool, model=model, generate=hf.VLLM())
        elastic = hf.Elastic(pool, actor=actor, rollout=rollout)
        loader = hf.PromptLoader([{"prompt": "1+1="}] * 8, batch_size=8)
        stream = elastic.stream(loader, n=2, minibatches=2)
        for batch in stream:
            seen.update(stream.metrics())
            batch |= {"advantages": torch.zeros(16)}
            actor.update_actor(batch, loss=lambda outputs, rows, totals: (outputs["log_probs"].sum(), {}))
            hf.sync_weights(actor, rollout)

    seen: dict[str, float] = {}
    found = trace_driver(driver)
    assert (found.elastic, found.rows) == (True, 16)
    assert seen["elastic/switches"] == 0.0
    assert list(kinds(found.graph)) == ["rollout.generate_sequences", UPDATE]


def test_groups_that_no_device_can_hold_are_refused_before_anything_starts(tmp_path: Path, monkeypatch):
    """By the memory of this machine's devices, where the run will use them."""
    model = make_policy(tmp_path / "policy")

    def driver():
        pool = hf.ResourcePool(2)
        settings = {"model": model, "train": hf.Megatron(tp=2)}
        generate = hf.VLLM(memory_fraction=0.6, max_length=16, sampling=hf.Sampling(max_tokens=4))
        actor = hf.ActorWorker.on(pool, **settings, optim=hf.Adam(lr=1.0), generate=generate)
        hf.ReferenceWorker.on(pool[0:1], model=model, train=hf.FSDP())
        if closes:
            actor.close()
        hf.CriticWorker.on(pool, **settings, optim=hf.Adam(lr=1.0))

    closes = False
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    parameters = read_spec(model, "lm").num_parameters
    monkeypatch.setattr("hybridflow.tracing.trace_backend.driver_answers", lambda: ("580", 36 * parameters))
    check_driver(driver)  # without CUDA
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(PlacementError, match=r"critic does not fit on its devices: while actor gen.*reference we"):
        check_driver(driver)
    closes = True
    check_driver(driver)
    closes = False
    monkeypatch.setattr("hybridflow.tracing.trace_backend.driver_answers", lambda: ("580", 60 * parameters))
    check_driver(driver)
    monkeypatch.setattr("hybridflow.tracing.trace_backend.driver_answers", lambda: ("580", 1))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_driver(driver)  # the devices of that cluster are unknown


def test_addresses_are_checked_before_anything_starts_and_not_for_a_plan(tmp_path: Path, monkeypatch):
    model = make_policy(tmp_path / "policy")

    def driver():
        generate = hf.VLLM(max_length=16, sampling=hf.Sampling(max_tokens=4))
        actor = hf.ActorWorker.on(hf.ResourcePool(1), model=model, optim=hf.SGD(lr=1.0), generate=generate)
        run = hf.Run(address, console=False)
        for prompts in run.loop(hf.PromptLoader([{"prompt": "1+1="}] * 8, batch_size=8)):
            batch = actor.generate_sequences(prompts)
            run.step(batch, actor.update_actor(batch | {"advantages": torch.zeros(8)}, loss=lambda *_: None))

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing answers there
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    address = "s3://bucket/run"
    assert trace_driver(driver).graph
    with pytest.raises(ConfigError, match=r"s3://bucket/run/checkpoints/.* cannot be written: .*Check the address"):
        check_driver(driver)
    address = "gs://bucket/run"
    with pytest.raises(ConfigError, match="pip install gcsfs"):
        check_driver(driver)


# The papers' programs


def test_the_papers_programs():
    big, little = PUBLISHED["llama3-70b"], PUBLISHED["llama3-7b"]
    six = ppo(big, little, reward=little, log_probs=False, minibatches=8)
    inference = dict.fromkeys((REF, "critic.compute_values", REWARD), "inference")
    training = dict.fromkeys(("critic.update_critic", UPDATE), "training")
    assert kinds(six) == {GENERATE: "generation", ADVANTAGE: "function", **inference, **training}
    assert six.models["reference"] == big
    assert six.call(UPDATE).minibatches == 8
    assert data(six, UPDATE) == {GENERATE: "prompt_ids response_ids response_mask log_probs", ADVANTAGE: "advantages"}
    assert data(grpo(little), UPDATE)[REF] == "ref_log_probs"
    with pytest.raises(ConfigError, match=r"no call.*Did you mean 'actor.update_actor'"):
        six.call("actor.update")
    with pytest.raises(ConfigError, match="nothing to plan"):
        GraphBuilder().graph()
