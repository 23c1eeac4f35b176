"""Router replay (R3): training sends each token to the experts that generation chose for it.

A mixture of experts is not continuous: where generation and training round scores differently, a token goes to other
experts, and its log-probability jumps (Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", 2025). With the same experts only the numbers differ; gradients reach routers through the weights of
the experts.

Shapes: T tokens of this rank, k experts of each, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.batch.batch import Batch
from hybridflow.engines.flat_shards import canonical_name
from hybridflow.errors import ModelError
from hybridflow.models.architecture import Experts, architecture
from hybridflow.models.hf_spec import Decoder

ROUTING = "routed_experts"
"""The column: ragged [tokens, layers, k] uint8 or more, of each row's first tokens; layers are those with experts."""


class RouterReplay:
    """The experts of one layer's tokens, `forced` [T, k] (-1: the router's own), and on how many it would not have
    agreed: `counts` [tokens with another expert, tokens] float32, since `take`."""

    def __init__(self) -> None:
        self.forced: Tensor | None = None
        self.counts: Tensor | None = None

    def __call__(self, chosen_Tk: Tensor) -> Tensor:
        """The experts to send tokens to, int64, where the router chooses `chosen`."""
        if self.forced is None:
            return chosen_Tk
        forced_Tk = self.forced.to(chosen_Tk.dtype)
        known_T = forced_Tk[:, 0] >= 0
        found_Tk = torch.where(known_T[:, None], forced_Tk, chosen_Tk)
        differs_T = (found_Tk.sort(-1).values != chosen_Tk.sort(-1).values).any(-1)
        counts = torch.stack([differs_T.sum(), known_T.sum()]).float()
        self.counts = counts if self.counts is None else self.counts + counts
        return found_Tk

    def take(self) -> Tensor | None:
        counts, self.counts = self.counts, None
        return counts


class Replays:
    """The replays of a rank's layers, `first` being the number of the first among all layers with experts. The ranks of
    `group` may have different tokens of the same rows."""

    def __init__(self, layers: Sequence[RouterReplay], first: int = 0, group: dist.ProcessGroup | None = None) -> None:
        self.layers, self.first, self.group = layers, first, group

    def set(self, routing: Tensor | None) -> None:
        """[T, layers of the model, k] of the tokens that come next; None: routers choose."""
        for at, layer in enumerate(self.layers, self.first):
            layer.forced = None if routing is None else routing[:, at]

    def clear(self) -> None:
        """What was counted is of passes without gradients."""
        for layer in self.layers:
            layer.take()

    def metrics(self, batch: Batch, tokens: float) -> list[dict[str, Tensor]]:
        """Of the mini-batch since the last call, which has `tokens` on all replicas: this one's part of
        `actor/routing_difference`, the share of tokens (of this stage's layers) with another expert than the router's
        own. Collective over `group`."""
        found = [counts for layer in self.layers if (counts := layer.take()) is not None]
        if not found:
            return []
        counts = torch.stack(found).sum(0)
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(counts, group=self.group)
        own = len(batch.peek(ROUTING).values) / max(1.0, tokens)  # type: ignore[union-attr]
        return [{"actor/routing_difference": counts[0] / counts[1].clamp(min=1.0) * own}]


def replay_sizes(spec: Decoder, role: str = "the model") -> tuple[int, int, int]:
    """Layers with experts, experts of each token, experts of a layer. Errors: ModelError for a model without, and for
    one whose routers are not known."""
    arch = architecture(spec)
    if arch.experts is None:
        raise ModelError(f"{role}: replay_routing=True needs a mixture of experts, and this is a {spec.family} model.")
    return sum(arch.sparse), arch.experts.chosen, arch.experts.count


def follow(model: nn.Module, spec: Decoder) -> Replays:
    """The replays of transformers' model, whose routers return (logits, weights, experts)."""
    arch = architecture(spec)
    assert arch.experts is not None, "checked by replay_sizes"
    layers = []
    for layer, sparse in enumerate(arch.sparse):
        if sparse:
            gate = arch.experts.names[0].replace("block_sparse_moe", "mlp")  # transformers' name since version 5
            end = f"layers.{layer}.{gate}"
            router = next(module for n, module in model.named_modules() if canonical_name(n).endswith(end))
            layers.append(replay := RouterReplay())
            router.register_forward_hook(partial(_replayed, replay, arch.experts))
    return Replays(layers)


def _replayed(replay: RouterReplay, experts: Experts, module: nn.Module, args: Any, out: Any) -> tuple[Tensor, ...]:
    """Hook of a router."""
    if replay.forced is None:
        return out
    logits_TE, weights_Tk, chosen_Tk = out
    found_Tk = replay(chosen_Tk)
    scores_TE = logits_TE.sigmoid() if experts.score == "sigmoid" else logits_TE.float().softmax(-1)
    return logits_TE, weights(scores_TE, found_Tk, experts).to(weights_Tk.dtype), found_Tk


def weights(scores_TE: Tensor, chosen_Tk: Tensor, experts: Experts) -> Tensor:
    """[T, k]: what the outputs of the chosen experts are multiplied by."""
    weights_Tk = scores_TE.gather(-1, chosen_Tk)
    if experts.normalized:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + (1e-20 if experts.score == "sigmoid" else 0.0))
    return weights_Tk * experts.scale if experts.scale != 1.0 else weights_Tk
