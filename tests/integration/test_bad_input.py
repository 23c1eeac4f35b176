"""Bad input: an error class of its own, and a message that says what was asked, what was found and what to do.

What can be seen on the driver is refused there, before any model is built.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridflow as hf
from hybridflow import errors
from tests import tiny_models
from tests.tiny_models import make_prompts, make_rows

MODEL = "model.safetensors"


@pytest.fixture(scope="module")
def bare(policy, tmp_path_factory) -> Path:
    """The same model without a tokenizer."""
    home = tmp_path_factory.mktemp("bare")
    for name in ("config.json", MODEL):
        shutil.copy(policy / name, home / name)
    return home


@pytest.fixture(scope="module")
def critic(keep, pool, bare) -> hf.WorkerGroup:
    return keep(hf.CriticWorker, pool[:2], name="the critic", model=bare, optim=hf.SGD(lr=0.1))


@pytest.fixture(scope="module")
def actor(keep, pool, bare) -> hf.WorkerGroup:
    """On two hosts that generate and train as two replicas."""
    return keep(
        hf.ActorWorker,
        pool[:2],
        name="the actor",
        model=bare,
        optim=hf.SGD(lr=0.1),
        generate=hf.VLLM(kv_cache_gb=0.1, sampling=hf.Sampling(max_tokens=4)),
    )


@pytest.fixture(scope="module")
def frozen(keep, pool, bare) -> hf.WorkerGroup:
    """An actor that neither trains nor generates."""
    return keep(hf.ActorWorker, pool[:1], name="frozen", model=bare)


@contextmanager
def refused(pool: hf.ResourcePool, error: type[Exception], *says: str) -> Iterator[None]:
    """The block raises `error` with all of these texts, and no host began to build or to run anything."""
    before = len(pool.events())
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    for text in says:
        assert text in str(caught.value)
    assert len(pool.events()) == before


# Devices and parallel sizes


@pytest.mark.parametrize(
    ("worker", "sizes", "train", "error", "says"),
    [
        (hf.ActorWorker, {}, hf.Megatron(tp=3), errors.PlacementError, "1*3*1 = 3 devices, the pool has 4"),
        (hf.ActorWorker, {}, hf.Megatron(tp=2, dp=1), errors.PlacementError, "Use Megatron(tp=2, pp=1, dp=2)"),
        (
            hf.CriticWorker,
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
            hf.Megatron(tp=4),
            errors.ModelError,
            "critic has 3 kv-heads, which neither divide by t=4",
        ),
        (
            hf.ReferenceWorker,
            {"num_hidden_layers": 1},
            hf.Megatron(pp=2),
            errors.ModelError,
            "reference has 1 layers, fewer than p=2 stages",
        ),
    ],
    ids=["pool", "replicas", "kv-heads", "layers"],
)
def test_sizes_that_do_not_fit_the_pool_or_the_model(pool, tmp_path, worker, sizes, train, error, says):
    model = tiny_models.make_policy(tmp_path, **sizes)
    with refused(pool, error, says):
        worker.on(pool, model=model, train=train)


def test_generation_sizes_that_the_group_cannot_form(pool, bare):
    with refused(pool, errors.PlacementError, "actor: VLLM(tp=8, pp=1): generation sizes p_g=1, t_g=8", "p*t*d = 4"):
        hf.ActorWorker.on(pool, model=bare, train=hf.Megatron(tp=2), generate=hf.VLLM(tp=8))
    with refused(pool, errors.ConfigError, "VLLM(max_length=65): the model's context is 64 tokens"):
        hf.ActorWorker.on(pool, model=bare, generate=hf.VLLM(max_length=65))
    too_many = "max_tokens=64 leaves no room for a prompt: the model's context is 64 tokens"
    with refused(pool, errors.ConfigError, too_many, "Use max_tokens below 64"):
        hf.ActorWorker.on(pool, model=bare, generate=hf.VLLM(sampling=hf.Sampling(max_tokens=64)))
    with refused(pool, errors.ConfigError, "max_tokens=256", "VLLM(max_length=32) is 32 tokens", "up to 64"):
        hf.RolloutWorker.on(pool, model=bare, generate=hf.VLLM(max_length=32, sampling=hf.Sampling(max_tokens=256)))


ADAM = hf.Adam(lr=0.1)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"bucket_mb": 0}, ["bucket_mb=0", "megabytes above 0"]),
        ({"bucket_mb": 8, "generate": None}, ["bucket_mb=8", "this actor does not generate"]),
        ({"offload": ("optimiser",)}, ["offload='optimiser' is unknown. Did you mean 'optimizer'?"]),
        ({"offload": True}, ["offload=True: give several"]),
        ({"offload": ("optimizer",)}, ["without optim= there are no optimizer"]),
        ({"overlap": True}, ["overlap=True", "give optim="]),
    ],
)
def test_transitions_that_cannot_be(pool, bare, settings, parts):
    with refused(pool, errors.ConfigError, *parts):
        hf.ActorWorker.on(pool, **({"model": bare, "generate": hf.VLLM()} | settings))


def test_only_models_wait_in_host_memory(pool, bare):
    with refused(pool, errors.ConfigError, "CriticWorker(offload=('optimizer',)): the critic waits as a whole"):
        hf.CriticWorker.on(pool, model=bare, offload=("optimizer",))
    with refused(pool, errors.ConfigError, "RewardWorker(offload=True): a function has nothing to move"):
        hf.RewardWorker.on(pool, function=lambda prompts, completions: [], offload=True)


# Checkpoints


def damaged(bare: Path, home: Path, damage: Callable[[Path], None]) -> Path:
    shutil.copytree(bare, home)
    damage(home)
    return home


def truncate(home: Path) -> None:
    weights = (home / MODEL).read_bytes()
    (home / MODEL).write_bytes(weights[: len(weights) // 2])


def drop_a_tensor(home: Path) -> None:
    tensors = load_file(home / MODEL)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, home / MODEL, metadata={"format": "pt"})


def ask_for_code(home: Path) -> None:
    (home / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')


def rename_family(home: Path) -> None:
    config = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps(config | {"model_type": "quen3"}))


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (truncate, errors.CheckpointError, [MODEL, "is truncated", "Download or copy it again"]),
        (drop_a_tensor, errors.CheckpointError, ["lacks 1 of the 21 tensors", "model.layers.1.mlp.up_proj.weight"]),
        (lambda home: (home / MODEL).unlink(), errors.CheckpointError, ["needs *.safetensors files", "Convert"]),
        (lambda home: (home / "config.json").unlink(), errors.CheckpointError, ["config.json does not exist"]),
        (ask_for_code, errors.CheckpointError, ["tokenizer_config.json asks by 'auto_map' for code", "never runs"]),
        (rename_family, errors.ModelError, ["model_type 'quen3' is not supported", "Did you mean 'qwen3'?"]),
    ],
    ids=["truncated", "a tensor short", "no weights", "no config", "code", "family"],
)
def test_checkpoints_that_cannot_be_loaded(pool, bare, tmp_path, damage, error, says):
    home = damaged(bare, tmp_path / "model", damage)
    for worker in (hf.ActorWorker, hf.CriticWorker, hf.ReferenceWorker, hf.RewardWorker):
        with refused(pool, error, *says):
            worker.on(pool, model=home)


def test_a_language_model_is_no_reward_model(pool, bare):
    """Its value head would be zeros, and so would every reward."""
    says = ["no score.weight", "would give 0 for every row", "sequence-classification checkpoint", "or function="]
    with refused(pool, errors.CheckpointError, f"reward: {bare} has a language model's lm_head.weight", *says):
        hf.RewardWorker.on(pool, model=bare)


def test_a_checkpoint_is_found_from_the_drivers_directory(place, pool, bare, monkeypatch):
    """Hosts have directories of their own: they are given the absolute path."""
    monkeypatch.chdir(bare.parent)
    reference = place(hf.ReferenceWorker, pool[:1], model=bare.name)
    assert reference.settings["model"] == str(bare.resolve())
    assert len(reference.compute_ref_log_prob(make_rows()).get()) == 7


def test_a_second_generating_actor_in_the_same_hosts(pool, actor, bare):
    with refused(pool, errors.PlacementError, "the actor has one already", "the actor.close()", "other devices"):
        hf.ActorWorker.on(pool[1:3], model=bare, generate=hf.VLLM(kv_cache_gb=0.1))


def test_a_checkpoint_that_is_not_there(pool):
    with refused(pool, errors.CheckpointError, "the checkpoint directory /nowhere/model does not exist"):
        hf.ReferenceWorker.on(pool, model="/nowhere/model")
    with refused(pool, errors.CheckpointError, "nobody/no-such-model is neither a directory nor a model that the hub"):
        hf.ReferenceWorker.on(pool, model="nobody/no-such-model")


# Names


class PassingOn(hf.ActorWorker):
    """Its settings are its own and those of `ActorWorker`."""

    def __init__(self, *, pace: float, **settings: Any) -> None:
        super().__init__(**settings)


def test_settings_that_do_not_exist(pool, bare):
    with refused(pool, errors.ConfigError, "Megatron has no setting 'tpp'", "Did you mean 'tp'?"):
        hf.ActorWorker.on(pool, model=bare, train=hf.Megatron(tpp=2))  # pyright: ignore[reportCallIssue]
    with refused(pool, errors.ConfigError, "VLLM has no setting 'max_tokens'", "sampling=hf.Sampling(max_tokens=...)"):
        hf.ActorWorker.on(pool, model=bare, generate=hf.VLLM(max_tokens=1))  # pyright: ignore[reportCallIssue]
    with refused(pool, errors.ConfigError, "ActorWorker: no setting 'trian'", "Did you mean 'train'?"):
        hf.ActorWorker.on(pool, model=bare, trian=hf.Megatron())
    with refused(pool, errors.ConfigError, "ActorWorker(generate=3): give hf.VLLM"):
        PassingOn.on(pool, model=bare, pace=1.0, generate=3)
    with refused(pool, errors.ConfigError, "PassingOn: missing a required argument: 'pace'"):
        PassingOn.on(pool, model=bare)
    with refused(pool, errors.ConfigError, "ActorWorker(train='megatron')", "such as hf.Megatron(tp=2)"):
        hf.ActorWorker.on(pool, model=bare, train="megatron")
    with refused(pool, errors.ConfigError, "CriticWorker(optim=0.1)", "hf.Adam(lr=...)"):
        hf.CriticWorker.on(pool, model=bare, optim=0.1)
    with refused(pool, errors.ConfigError, "either model= (a checkpoint) or function="):
        hf.RewardWorker.on(pool)


def test_losses_and_options_that_do_not_exist(pool, actor, critic):
    rows = make_rows()
    with refused(pool, errors.ConfigError, "policy loss 'pppo' is unknown", "Did you mean 'ppo'?"):
        actor.update_actor(rows, loss="pppo")
    with refused(pool, errors.ConfigError, "no setting 'clp'", "Did you mean 'clip'?"):
        actor.update_actor(rows, clp=0.1)
    with refused(pool, errors.ConfigError, "no setting 'minibatch'", "Did you mean 'minibatches'?"):
        actor.update_actor(rows, minibatch=2)
    with refused(pool, errors.ConfigError, "minibatches=0 must be a whole number of at least 1"):
        critic.update_critic(rows, minibatches=0)
    with refused(pool, errors.ConfigError, "minibatches=32 for a batch of 7 rows", "Use minibatches of at most 7"):
        actor.update_actor(rows, minibatches=32)
    for update in (actor.update_actor, critic.update_critic):
        uneven = (
            "16 rows, which would be 2 mini-batches of 3 rows and 5 of 2",
            "Use minibatches=4 or 8, or uneven=True",
        )
        with refused(pool, errors.ConfigError, *uneven):
            update(make_rows(16), minibatches=7)
        with refused(pool, errors.ConfigError, "uneven=1: give True or False"):
            update(make_rows(16), minibatches=7, uneven=1)
    with refused(pool, errors.ConfigError, "value loss 'valu' is unknown", "Did you mean 'value'?"):
        critic.update_critic(rows, loss="valu")
    with refused(pool, errors.ConfigError, "Sampling has no setting 'max_token'", "Did you mean 'max_tokens'?"):
        actor.generate_sequences(make_prompts(), max_token=2)
    with refused(
        pool, errors.ConfigError, "max_tokens=64 leaves no room for a prompt: the model's context is 64 tokens"
    ):
        actor.generate_sequences(make_prompts(), max_tokens=64)
    with pytest.raises(AttributeError, match=r"has no operation 'update'\. Did you mean 'update_actor'"):
        actor.update(rows)


def test_estimators_and_options_that_do_not_exist(pool):
    rows = make_rows().with_columns(rewards=torch.zeros(7))
    with refused(pool, errors.ConfigError, "advantage estimator 'gea' is unknown", "Did you mean 'gae'?"):
        hf.compute_advantage(rows, "gea")
    with refused(pool, errors.ConfigError, "GAE has no setting 'lambda_'", "Did you mean 'lam'?"):
        hf.compute_advantage(rows, "gae", lambda_=0.9)
    with refused(pool, errors.ConfigError, "'k4'"):
        hf.compute_advantage(rows, "gae", kl="k4")
    with refused(pool, errors.ConfigError, "kl_coef='high' is not a KL coefficient"):
        hf.compute_advantage(rows, "gae", kl_coef="high")


# Rows and columns


def test_columns_that_nobody_wrote(pool, actor, critic):
    rows = make_rows()
    with refused(pool, errors.MissingColumnError, "update_critic reads 'values'", "the critic.compute_values(batch)"):
        critic.update_critic(rows.without("values"))
    with refused(pool, errors.MissingColumnError, "reads 'advantages'", "call hf.compute_advantage(batch, ...) first"):
        actor.update_actor(rows.without("advantages"))
    with refused(pool, errors.MissingColumnError, "reads 'old_log_probs'", "the actor.compute_log_prob(batch) first"):
        actor.update_actor(rows.without("old_log_probs"))
    with refused(pool, errors.MissingColumnError, "reads 'ref_log_probs'"):
        hf.compute_advantage(rows.with_columns(rewards=torch.zeros(7)), "gae", kl_coef=0.1)
    with refused(pool, errors.MissingColumnError, "generate_sequences reads 'prompt_ids'"):
        actor.generate_sequences(hf.Batch({"answer": ["4"]}))


def test_batches_without_rows_or_with_other_rows(pool, actor, critic):
    rows = hf.BatchRef.from_batch(make_rows())
    for call in (actor.generate_sequences, actor.update_actor, critic.compute_values):
        with refused(pool, errors.EmptyBatchError, "was given a batch without rows"):
            call(rows[0:0])
    with refused(pool, errors.EmptyBatchError, "compute_advantage was given a batch without rows"):
        hf.compute_advantage(rows[0:0] | hf.Batch({"rewards": torch.zeros(0)}), "gae")
    values = critic.compute_values(rows)
    with pytest.raises(errors.BatchError, match="cannot unite a batch of 7 rows with one of 4 rows"):
        _ = rows | values[0:4]


def test_actors_that_cannot_train_or_generate(pool, frozen):
    with refused(pool, errors.ConfigError, "does not generate", "ActorWorker.on(..., generate=hf.VLLM(...))"):
        frozen.generate_sequences(make_prompts())
    with refused(pool, errors.ConfigError, "has no optimizer", "ActorWorker.on(..., optim=hf.Adam(lr=...))"):
        frozen.update_actor(make_rows())


# Rows that one data parallel rank cannot compute


def with_response(row: int, ids: list[int]) -> hf.Batch:
    rows = make_rows()
    listed = rows["response_ids"].tolist()
    listed[row] = ids
    return rows.with_columns(response_ids=hf.Ragged.from_rows(listed, torch.int64))


def test_rows_that_one_rank_cannot_compute(pool, settle, actor, critic):
    """Every rank of the group hears of it before it waits for that one: no collective is left half done, and the
    next call works."""
    rows, length = make_rows(), int(make_rows()["response_ids"].lengths[5])
    foreign = with_response(5, [99] * length)
    for group, call in ((critic, critic.compute_values), (critic, critic.update_critic), (actor, actor.update_actor)):
        with pytest.raises(errors.BatchError, match=r"has the token id 99 in response_ids, .* 0\.\.55") as caught:
            call(foreign).get()
        assert isinstance(caught.value, errors.WorkerError)
        assert caught.value.role == group.name
        with pytest.raises(errors.BatchError, match="every row needs the same length"):
            _ = critic.update_critic(with_response(5, [5] * (length + 1))).get()
        settle()
    assert len(critic.compute_values(rows).get()) == 7


def test_rows_drawn_at_different_temperatures(settle, actor):
    """On one rank or on two, which would not see it in their own rows."""
    for several in ([0.7] + [1.0] * 6, [0.7] * 4 + [1.0] * 3):
        rows = make_rows().with_columns(temperature=torch.tensor(several))
        with pytest.raises(errors.BatchError, match=r"from 0\.7 to 1"):
            actor.compute_log_prob(rows).get()
    settle()


def test_an_update_that_fails_half_way_is_not_forgotten_by_generation(settle, actor):
    """Its first step was made: the next responses come from the weights that training has."""
    rows = make_rows(4)
    actor.generate_sequences(make_prompts()).get()
    with pytest.raises(errors.WorkerError, match="LookupError: no second mini-batch for me"):
        actor.update_actor(rows, loss=only_rows(0, 1), minibatches=2).get()
    settle()
    drawn = actor.generate_sequences(make_prompts())
    drawn = (drawn | actor.compute_log_prob(drawn)).get()
    assert (drawn["log_probs"].values - drawn["old_log_probs"].values).abs().max() < 1e-3


def only_rows(*known: int) -> Callable[..., Any]:
    """A loss that is defined for some of the rows."""

    def loss(outputs, rows, totals):
        if not set(rows["row_id"].tolist()) <= {100 + row for row in known}:
            raise LookupError("no second mini-batch for me")
        return -outputs["log_probs"].values.sum(), {}

    return loss


# Prompts


def with_prompt(row: int, ids: list[int]) -> hf.Batch:
    prompts = make_prompts()
    listed = prompts["prompt_ids"].tolist()
    listed[row] = ids
    return prompts.with_columns(prompt_ids=hf.Ragged.from_rows(listed, torch.int64))


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([5] * 64, r"prompt 105 has 64 tokens and leaves no room .* max_length=64 .* Shorten or filter"),
        ([], r"prompt 105 is empty\. Give it at least one token"),
        ([5, 99], r"prompt 105 has token ids from 5 to 99, the vocabulary is 0\.\.55"),
    ],
    ids=["too long", "empty", "another tokenizer"],
)
def test_prompts_that_cannot_be_answered(actor, ids, says):
    """The row is named as in the batch, whichever rank met it; the next call works."""
    with pytest.raises(errors.PromptError, match=says) as caught:
        actor.generate_sequences(with_prompt(5, ids)).get()
    assert isinstance(caught.value, errors.WorkerError)
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("the actor", 1, "generate_sequences")
    assert len(actor.generate_sequences(make_prompts()).get()) == 7


def test_texts_without_a_tokenizer(pool, actor, policy, bare):
    texts = hf.Batch({"row_id": torch.arange(2), "prompt": ["ab", "c"]})
    with refused(pool, errors.PromptError, f"{bare} has no tokenizer", "Give prompt_ids"):
        actor.generate_sequences(texts)
    with refused(pool, errors.CheckpointError, "has no tokenizer"):
        hf.PromptLoader([{"prompt": "ab"}], batch_size=1, tokenizer=bare)


# Reward functions


@hf.rewards.per_row
def raises(prompt, response, row_id):
    if row_id == 105:
        raise ZeroDivisionError("nothing to divide by")
    return 1.0


def scores(prompts, completions, row_id):
    return [None if row == 105 else 1.0 for row in row_id]


REWARDS = {
    "raises": (raises, r"function raises raised ZeroDivisionError at row 105: nothing to divide by"),
    "None": (scores, r"scores returned None \(NoneType\) at row 105; it must be a number"),
}


@pytest.fixture
def answered() -> hf.Batch:
    texts = {"prompt": [f"p{i}" for i in range(7)], "response": [f"r{i}" for i in range(7)]}
    return make_rows().with_columns(**texts)


@pytest.mark.parametrize("name", REWARDS)
def test_reward_functions_that_fail(place, pool, settle, answered, name):
    """A RewardError wherever the driver looks: at the rewards, at what was computed from them, in the loader."""
    function, says = REWARDS[name]
    reward = place(hf.RewardWorker, pool[:2], function=function)
    batch = hf.BatchRef.from_batch(answered)
    batch |= reward.compute_reward(batch)
    advantages = hf.compute_advantage(batch, "gae")
    for look in (batch.get, batch["rewards"].get, batch.metrics().get, advantages.get):
        with pytest.raises(errors.RewardError, match=says):
            look()
    settle()
    with pytest.raises(errors.RewardError, match=says):
        loop(reward, batch)
    settle()


def loop(reward: hf.WorkerGroup, batch: hf.BatchRef) -> None:
    """A driver that never looks at the rewards."""
    for _ in hf.PromptLoader([{"prompt": "a"}], batch_size=1, steps=3):
        reward.compute_reward(batch)


def test_reward_functions_that_cannot_be_called(place, pool, answered, policy):
    with refused(pool, errors.ConfigError, "no_arguments()", "must take (prompts, completions, **columns)"):
        hf.RewardWorker.on(pool, function=no_arguments)
    with refused(pool, errors.ConfigError, "has no signature"):
        hf.RewardWorker.on(pool, function="exact match")
    reward = place(hf.RewardWorker, pool[:2], function=scores)
    with refused(pool, errors.MissingColumnError, "reads 'prompt'"):
        reward.compute_reward(answered.without("prompt", "prompt_ids"))
    with pytest.raises(errors.RewardError, match=r"prompt_ids and no prompt text.* tokenizer="):
        reward.compute_reward(answered.without("prompt")).get()


def no_arguments():
    return []
