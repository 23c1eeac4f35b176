"""GRPO: a response is as good as it is better than the others to its prompt. Shapes: B rows."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.group import Groups
from hybridflow.algorithms.precision import result_dtype


def grpo(scores: Tensor, groups: Groups, *, normalize: bool = True, eps: float = 1e-6) -> Tensor:
    """[B]: A_i = (r_i - mean of its group) / (std of its group + eps), the same for every token of the response.

    `scores` [B] float. The standard deviation has Bessel's correction, as in TRL and verl; `eps` is verl's (TRL adds
    1e-4). A group of one row gets 0, where verl gives it its raw score: a response that is compared with nothing
    teaches nothing.
    `normalize=False` leaves out the division: `dr_grpo`.
    Shao et al., "DeepSeekMath" (2024), section 4.1.
    """
    centred = groups.centred(scores)
    return (centred / (groups.std(scores) + eps) if normalize else centred).to(result_dtype(scores.dtype))


def dr_grpo(scores: Tensor, groups: Groups) -> Tensor:
    """[B]: A_i = r_i - mean of its group; `scores` [B] float.

    Liu et al., "Understanding R1-Zero-like training: a critical perspective" (Dr. GRPO, 2025): dividing by the std
    favours prompts that are nearly always or nearly never solved. The constant length of its loss is the aggregation
    `seq-mean-token-sum-norm`.
    """
    return grpo(scores, groups, normalize=False)
