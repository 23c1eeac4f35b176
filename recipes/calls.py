"""Calls of an iteration that are written as settings: `actor.generate_sequences: {n: 8}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

import hybridflow as hf
from hybridflow.errors import ConfigError, nearest
from recipes.task import Task

Call = tuple[str, str, dict[str, Any]]
"""A role, one of its operations (none: a function of the controller), and options."""
ROLES = {"actor": "ActorWorker", "critic": "CriticWorker", "reference": "ReferenceWorker", "reward": "RewardWorker"}
VALUES = {"train": hf.Megatron, "optim": hf.Adam, "generate": hf.VLLM}
ADVANTAGE = "compute_advantage"


def read(given: Any) -> list[Call]:
    """Errors: ConfigError for what is no call, with the nearest role, before anything is made."""
    found, plain = list[Call](), given
    if OmegaConf.is_list(given):
        plain = OmegaConf.to_container(given, resolve=True)
    for each in plain if isinstance(plain, list) else [plain]:
        ((name, options),) = each.items() if isinstance(each, dict) and len(each) == 1 else ((each, {}),)
        if not isinstance(name, str) or not isinstance(options := options or {}, dict):
            raise ConfigError(f"loop: {each!r} is no call. Write lines like - actor.generate_sequences: {{n: 8}}.")
        role, _, operation = name.partition(".")
        known = ROLES if operation else {ADVANTAGE: ""}
        if role not in known:
            raise ConfigError(f"loop: {role!r} is no {'role' if operation else 'call'}.{nearest(role, known)}")
        found.append((role, operation, options))
    if not {"actor", "reward"} <= {role for role, _, _ in found}:
        raise ConfigError("loop: give calls of the actor and of the reward, as in recipes/from_config.yaml.")
    called = [operation for _, operation, _ in found]
    if called.count("generate_sequences") > 1:
        raise ConfigError("loop: a second generate_sequences would overwrite the answers of the first. Give one.")
    if not any(operation.startswith("update_") for operation in called):
        raise ConfigError("loop: no call updates a model. Give one such as - actor.update_actor.")
    return found


def groups(cfg: Any, loop: Sequence[Call], job: Task) -> dict[str, hf.WorkerGroup]:
    """Those that the loop calls, on one pool. Errors: ConfigError for an operation that a group has not."""
    pool, made = hf.ResourcePool(cfg.devices), dict[str, hf.WorkerGroup]()
    for role, operation, _ in loop:
        if operation and role not in made:
            own = job.reward if role == "reward" else {name: VALUES[name](**cfg[role][name]) for name in cfg[role]}
            made[role] = getattr(hf, ROLES[role]).on(pool, **({} if role == "reward" else {"model": job.model}), **own)
        if operation and operation not in (known := made[role].operations):
            raise ConfigError(f"loop: {role} has no operation {operation!r}.{nearest(operation, known)}")
    return made


def made(loop: Sequence[Call], groups: Mapping[str, hf.WorkerGroup], prompts: hf.BatchRef) -> list[Any]:
    """The batch with the columns of all calls, and what others of them return: metrics."""
    batch, metrics = prompts, list[Any]()
    for role, operation, options in loop:
        call = getattr(groups[role], operation) if operation else hf.compute_advantage
        found = call(batch, **options)
        if isinstance(found, hf.BatchRef):  # generation repeats the rows of the prompts
            batch = found if batch is prompts else batch | found
        else:
            metrics.append(found)
    return [batch, *metrics]
