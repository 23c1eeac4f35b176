"""hybridflow: reinforcement learning of language models as one driver script (HybridFlow, EuroSys '25).

Names are loaded when they are first used, so importing the package takes neither torch nor ray. Estimators and losses
are in `hf.algorithms`, constraints in `hf.planner`, environments of other packages in `hf.environments`, verifiers in
`hf.rewards`, custom protocols in `hf.protocols`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hybridflow.lazy_names import LazyNames as _LazyNames

if TYPE_CHECKING:
    from hybridflow import algorithms as algorithms
    from hybridflow import environments as environments
    from hybridflow import errors as errors
    from hybridflow import planner as planner
    from hybridflow import protocols as protocols
    from hybridflow import rewards as rewards
    from hybridflow.algorithms.registry import GAE as GAE
    from hybridflow.algorithms.registry import PPO as PPO
    from hybridflow.batch.batch import Batch as Batch
    from hybridflow.batch.ragged import Ragged as Ragged
    from hybridflow.cli.launch import run as run
    from hybridflow.cluster.batch_ref import BatchRef as BatchRef
    from hybridflow.cluster.group import WorkerGroup as WorkerGroup
    from hybridflow.cluster.pool import ResourcePool as ResourcePool
    from hybridflow.config import FSDP as FSDP
    from hybridflow.config import SGD as SGD
    from hybridflow.config import VLLM as VLLM
    from hybridflow.config import Adam as Adam
    from hybridflow.config import LoRA as LoRA
    from hybridflow.config import Megatron as Megatron
    from hybridflow.config import Mismatch as Mismatch
    from hybridflow.config import Sampling as Sampling
    from hybridflow.config import Until as Until
    from hybridflow.config import ZeRO as ZeRO
    from hybridflow.driver import KEEP as KEEP
    from hybridflow.driver import compute_advantage as compute_advantage
    from hybridflow.driver import init as init
    from hybridflow.driver import reallocate as reallocate
    from hybridflow.driver import shutdown as shutdown
    from hybridflow.driver import sync_weights as sync_weights
    from hybridflow.driver import together as together
    from hybridflow.engines.checkpoint.export import export as export
    from hybridflow.engines.worker_spec import WorkerSpec as WorkerSpec
    from hybridflow.held_out import HeldOut as HeldOut
    from hybridflow.held_out import HeldOutLoss as HeldOutLoss
    from hybridflow.loader import Mixture as Mixture
    from hybridflow.loader import PromptLoader as PromptLoader
    from hybridflow.loader import TextLoader as TextLoader
    from hybridflow.loader import dynamic_sampling as dynamic_sampling
    from hybridflow.loader import text_batch as text_batch
    from hybridflow.placement import Placement as Placement
    from hybridflow.protocols.operation import register as register
    from hybridflow.protocols.protocol import ALL_TO_ALL as ALL_TO_ALL
    from hybridflow.protocols.protocol import DP_PROTO as DP_PROTO
    from hybridflow.protocols.protocol import ONE_TO_ALL as ONE_TO_ALL
    from hybridflow.protocols.protocol import ONE_TO_ONE as ONE_TO_ONE
    from hybridflow.protocols.protocol import THREE_D_ALL_MICRO_DP as THREE_D_ALL_MICRO_DP
    from hybridflow.protocols.protocol import THREE_D_PP_AS_DP as THREE_D_PP_AS_DP
    from hybridflow.protocols.protocol import THREE_D_PP_ONLY as THREE_D_PP_ONLY
    from hybridflow.protocols.protocol import THREE_D_PROTO as THREE_D_PROTO
    from hybridflow.run.checkpoints import Checkpoints as Checkpoints
    from hybridflow.run.hub import push_to_hub as push_to_hub
    from hybridflow.run.run_state import load as load
    from hybridflow.run.run_state import save as save
    from hybridflow.run.training_run import Run as Run
    from hybridflow.streams.elastic import Elastic as Elastic
    from hybridflow.streams.stream import stream as stream
    from hybridflow.tracing.auto import auto as auto
    from hybridflow.tracing.trace import trace as trace
    from hybridflow.tracing.trace import trace_spec as trace_spec
    from hybridflow.tracking.tracker import Tracker as Tracker
    from hybridflow.workers.actor import ActorWorker as ActorWorker
    from hybridflow.workers.critic import CriticWorker as CriticWorker
    from hybridflow.workers.placing import place as place
    from hybridflow.workers.reference import ReferenceWorker as ReferenceWorker
    from hybridflow.workers.reward import CostWorker as CostWorker
    from hybridflow.workers.reward import RewardWorker as RewardWorker
    from hybridflow.workers.rollout import RolloutWorker as RolloutWorker
    from hybridflow.workers.worker import Worker as Worker

_names = _LazyNames(__name__)  # as type checkers read them above
_NAMESPACES = [name for name, module in _names.modules.items() if module == __name__]
__dir__, __all__ = _names.listed, [*_names.modules]
__version__ = "0.1.0"
importlib.import_module("hybridflow.run")  # the first import of the package binds its name here,
del globals()["run"]  # which is that of the function


def __getattr__(name: str) -> Any:
    if name not in _names.modules:
        within = _NAMESPACES if name[:1].isupper() else ()
        hint = next((f" Use hf.{n}.{name}." for n in within if hasattr(__getattr__(n), name)), "")
        raise AttributeError(f"module 'hybridflow' has no attribute {name!r}.{hint}")
    if name in _NAMESPACES:
        return importlib.import_module(f"hybridflow.{name}")
    return _names.load(name)
