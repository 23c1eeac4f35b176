"""hybridflow: reinforcement learning of language models as one driver script (HybridFlow, EuroSys '25).

Names are loaded when they are first used, so importing the package takes neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow import errors as errors
    from hybridflow import rewards as rewards
    from hybridflow.algorithms.kl import AdaptiveKL as AdaptiveKL
    from hybridflow.algorithms.kl import FixedKL as FixedKL
    from hybridflow.algorithms.lagrange import Lagrange as Lagrange
    from hybridflow.algorithms.rollout_correction import RolloutCorrection as RolloutCorrection
    from hybridflow.automatic import auto as auto
    from hybridflow.batch import Batch as Batch
    from hybridflow.cluster.batch_ref import BatchRef as BatchRef
    from hybridflow.cluster.future import Future as Future
    from hybridflow.cluster.group import WorkerGroup as WorkerGroup
    from hybridflow.cluster.pool import ResourcePool as ResourcePool
    from hybridflow.config import FSDP as FSDP
    from hybridflow.config import SGD as SGD
    from hybridflow.config import VLLM as VLLM
    from hybridflow.config import Adam as Adam
    from hybridflow.config import LoRA as LoRA
    from hybridflow.config import Megatron as Megatron
    from hybridflow.config import Sampling as Sampling
    from hybridflow.config import ZeRO as ZeRO
    from hybridflow.driver import compute_advantage as compute_advantage
    from hybridflow.driver import init as init
    from hybridflow.driver import reallocate as reallocate
    from hybridflow.driver import shutdown as shutdown
    from hybridflow.driver import sync_weights as sync_weights
    from hybridflow.loader import PromptLoader as PromptLoader
    from hybridflow.loader import TextLoader as TextLoader
    from hybridflow.model_spec import ModelSpec as ModelSpec
    from hybridflow.placement import Placement as Placement
    from hybridflow.planner.cluster_spec import ClusterSpec as ClusterSpec
    from hybridflow.planner.constraints import Apart as Apart
    from hybridflow.planner.constraints import Cap as Cap
    from hybridflow.planner.constraints import OneLayout as OneLayout
    from hybridflow.planner.constraints import Pin as Pin
    from hybridflow.planner.constraints import Together as Together
    from hybridflow.planner.workload import Workload as Workload
    from hybridflow.protocols import ALL_TO_ALL as ALL_TO_ALL
    from hybridflow.protocols import DP_PROTO as DP_PROTO
    from hybridflow.protocols import ONE_TO_ALL as ONE_TO_ALL
    from hybridflow.protocols import ONE_TO_ONE as ONE_TO_ONE
    from hybridflow.protocols import SKIP as SKIP
    from hybridflow.protocols import THREE_D_ALL_MICRO_DP as THREE_D_ALL_MICRO_DP
    from hybridflow.protocols import THREE_D_PP_AS_DP as THREE_D_PP_AS_DP
    from hybridflow.protocols import THREE_D_PP_ONLY as THREE_D_PP_ONLY
    from hybridflow.protocols import THREE_D_PROTO as THREE_D_PROTO
    from hybridflow.protocols import Protocol as Protocol
    from hybridflow.protocols import join as join
    from hybridflow.protocols import register as register
    from hybridflow.ragged import Ragged as Ragged
    from hybridflow.sampling import dynamic_sampling as dynamic_sampling
    from hybridflow.topology import RankGrid as RankGrid
    from hybridflow.tracing import abstract as abstract
    from hybridflow.tracing import trace as trace
    from hybridflow.tracker import Tracker as Tracker
    from hybridflow.workers.actor import ActorWorker as ActorWorker
    from hybridflow.workers.cost import CostWorker as CostWorker
    from hybridflow.workers.critic import CriticWorker as CriticWorker
    from hybridflow.workers.reference import ReferenceWorker as ReferenceWorker
    from hybridflow.workers.reward import RewardWorker as RewardWorker
    from hybridflow.workers.rollout import RolloutWorker as RolloutWorker
    from hybridflow.workers.worker import Worker as Worker
    from hybridflow.workers.worker import place as place

_WHERE = {
    "algorithms.kl": ("AdaptiveKL", "FixedKL"),
    "algorithms.lagrange": ("Lagrange",),
    "algorithms.rollout_correction": ("RolloutCorrection",),
    "automatic": ("auto",),
    "batch": ("Batch",),
    "cluster.batch_ref": ("BatchRef",),
    "cluster.future": ("Future",),
    "cluster.group": ("WorkerGroup",),
    "cluster.pool": ("ResourcePool",),
    "config": ("Adam", "FSDP", "LoRA", "Megatron", "SGD", "Sampling", "VLLM", "ZeRO"),
    "driver": ("compute_advantage", "init", "reallocate", "shutdown", "sync_weights"),
    "loader": ("PromptLoader", "TextLoader"),
    "model_spec": ("ModelSpec",),
    "placement": ("Placement",),
    "planner.cluster_spec": ("ClusterSpec",),
    "planner.constraints": ("Apart", "Cap", "OneLayout", "Pin", "Together"),
    "planner.workload": ("Workload",),
    "protocols": (
        *("ALL_TO_ALL", "DP_PROTO", "ONE_TO_ALL", "ONE_TO_ONE", "SKIP", "THREE_D_ALL_MICRO_DP", "THREE_D_PP_AS_DP"),
        *("THREE_D_PP_ONLY", "THREE_D_PROTO", "Protocol", "join", "register"),
    ),
    "ragged": ("Ragged",),
    "sampling": ("dynamic_sampling",),
    "topology": ("RankGrid",),
    "tracing": ("abstract", "trace"),
    "tracker": ("Tracker",),
    "workers.actor": ("ActorWorker",),
    "workers.cost": ("CostWorker",),
    "workers.critic": ("CriticWorker",),
    "workers.reference": ("ReferenceWorker",),
    "workers.reward": ("RewardWorker",),
    "workers.rollout": ("RolloutWorker",),
    "workers.worker": ("Worker", "place"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = ["errors", "rewards", *_MODULE_OF]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("errors", "rewards"):
        return importlib.import_module(f"hybridflow.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hybridflow' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hybridflow.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
