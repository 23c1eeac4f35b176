"""Advantage estimators (advantages/) and losses (losses/): one or one family per file, with formula and citation.

Each is a frozen value of its options that is called with tensors; `registry.py` has their names. To add one, write its
file and name it there. A user's function can replace each.
"""

from hybridflow.algorithms.advantages.gae import Lagrange as Lagrange
from hybridflow.algorithms.advantages.token_rewards import RunningNorm as RunningNorm
from hybridflow.algorithms.kl import AdaptiveKL as AdaptiveKL
from hybridflow.algorithms.logits import Logits as Logits
from hybridflow.algorithms.losses.loss import Totals as Totals
from hybridflow.algorithms.losses.policy import TokenLoss as TokenLoss
from hybridflow.algorithms.losses.rollout_correction import RolloutCorrection as RolloutCorrection
from hybridflow.algorithms.registry import CISPO as CISPO
from hybridflow.algorithms.registry import DPO as DPO
from hybridflow.algorithms.registry import GAE as GAE
from hybridflow.algorithms.registry import GDPO as GDPO
from hybridflow.algorithms.registry import GKD as GKD
from hybridflow.algorithms.registry import GMPO as GMPO
from hybridflow.algorithms.registry import GPG as GPG
from hybridflow.algorithms.registry import GRPO as GRPO
from hybridflow.algorithms.registry import GSPO as GSPO
from hybridflow.algorithms.registry import OPO as OPO
from hybridflow.algorithms.registry import PPO as PPO
from hybridflow.algorithms.registry import RLOO as RLOO
from hybridflow.algorithms.registry import SAPO as SAPO
from hybridflow.algorithms.registry import BradleyTerry as BradleyTerry
from hybridflow.algorithms.registry import DrGRPO as DrGRPO
from hybridflow.algorithms.registry import GRPOPassK as GRPOPassK
from hybridflow.algorithms.registry import PretrainLoss as PretrainLoss
from hybridflow.algorithms.registry import Reinforce as Reinforce
from hybridflow.algorithms.registry import ReinforceLoss as ReinforceLoss
from hybridflow.algorithms.registry import ReinforcePlusPlus as ReinforcePlusPlus
from hybridflow.algorithms.registry import ReinforcePlusPlusBaseline as ReinforcePlusPlusBaseline
from hybridflow.algorithms.registry import ReMax as ReMax
from hybridflow.algorithms.registry import SafeRLHF as SafeRLHF
from hybridflow.algorithms.registry import SFTLoss as SFTLoss
from hybridflow.algorithms.registry import ValueLoss as ValueLoss
from hybridflow.algorithms.registry import policy_loss as policy_loss
from hybridflow.algorithms.registry import value_loss as value_loss
