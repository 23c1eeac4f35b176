"""RunningNorm: rewards normalised by the mean and standard deviation of a run. Shapes: V rewards that count."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from hybridflow.algorithms.kl import Controller
from hybridflow.settings import Positive, check_fields


@dataclass(eq=False)
class RunningNorm(Controller):
    """(r - mean) / std, or without `center` r / std, within +-`clip`: of all rewards so far, those of the batch
    included.

    Rewards [B] count where a row has a valid token, token rewards at every valid token, trajectories once. std has
    Bessel's correction; as long as all rewards were equal they are not divided. One object is one statistic, kept from
    iteration to iteration and in the run's checkpoints; a batch that is given twice counts twice.

    TRL's `use_score_scaling` with `use_score_norm` (`center`) and `score_clip`. OpenRLHF's `normalize_reward` is by the
    mean and deviation of the reward model's own data instead. Chan et al., "Updating formulae and a pairwise algorithm
    for computing sample variances" (1979). Errors: ConfigError for a clip that is not positive and finite."""

    center: bool = True
    clip: Positive | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        self.state = [0.0, 0.0, 0.0]  # count, mean, sum of squared differences from it

    @property
    def mean(self) -> float:
        return self.state[1]

    @property
    def std(self) -> float:
        count, mean, squares = self.state
        found = math.sqrt(squares / max(1.0, count - 1))
        return found if found > 1e-12 * max(1.0, abs(mean)) else 0.0  # equal rewards differ by rounding

    def __call__(self, rewards_V: Tensor) -> Tensor:
        """Take in the rewards, float64; returns them normalised."""
        if not len(rewards_V):
            return rewards_V
        (before, mean, squares), new, own = self.state, len(rewards_V), float(rewards_V.mean())
        count, apart = before + new, own - mean
        squares += float((rewards_V - own).square().sum()) + apart**2 * before * new / count
        self.state = [count, mean + apart * new / count, squares]
        found = (rewards_V - self.mean if self.center else rewards_V) / (self.std or 1.0)
        return found if self.clip is None else found.clamp(-float(self.clip), float(self.clip))
