"""Sharding: messages of ranks that share parameters or gradients, as far as computation does not hide them. Pure.

While a layer computes, the parameters of the next one are gathered and the gradients of the one before are summed up
(Zhao et al. 2023, section 3.3), so a pass takes as long as its computation or as its messages, whichever is more; what
lies outside of the layers, and one layer, nothing hides.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.planner.stream import Setting, stage_pass

REDUCED = 4  # bytes per parameter of a gradient on its way: float32


@dataclass(frozen=True)
class Messages:
    """Seconds of a decoder layer's, and of what lies outside of the layers."""

    layer: float = 0.0
    ends: float = 0.0

    def all(self, layers: int) -> float:
        return layers * self.layer + self.ends

    def beside(self, layers: int, computation: float) -> float:
        """Of all, what `computation` seconds do not hide."""
        rest = max(0.0, (layers - 1) * self.layer - computation)
        return self.layer + self.ends + rest


def unhidden(setting: Setting, rows: float, training: bool) -> tuple[float, float]:
    """Seconds beside the computation of a micro-batch of `rows` rows: of most of them, and of the last before an
    optimizer step."""
    backend, layers = setting.backend, setting.size.layers
    if backend.stage == 1:
        return 0.0, 0.0
    forward = stage_pass(setting, rows, training=False)[0].total
    backward = stage_pass(setting, rows, training=True)[0].total - forward if training else 0.0
    gathers = gathered(setting) if backend.sharded else Messages()
    first = gathers.beside(layers, forward) if backend.sharded else 0.0
    if not training:
        return first, first
    again = Messages(gathers.layer, 0.0)  # what lies outside of the layers stays gathered from one pass to the next
    sums = summed(setting)
    both = Messages(again.layer + sums.layer, sums.ends)
    most, last = (both if backend.often else again), both
    return first + most.beside(layers, backward), first + last.beside(layers, backward)


def gathered(setting: Setting) -> Messages:
    """Parameters, in the dtype that computes."""
    t, size = setting.site.t, setting.size
    outside = size.total - size.layers * size.layer
    return Messages(*(_gather(setting, n / t * setting.itemsize) for n in (size.layer, outside)))


def _gather(setting: Setting, nbytes: float) -> float:
    site, shards = setting.site, setting.parallel.shards
    brought = nbytes / shards / site.host if setting.backend.offload else 0.0
    return site.collective(nbytes, shards, site.t) + brought


def summed(setting: Setting) -> Messages:
    """Gradients of what is trained, and where there are copies of the parameters, among these."""
    return Messages(*(_sum(setting, n / setting.site.t * REDUCED) for n in setting.trained))


def _sum(setting: Setting, nbytes: float) -> float:
    site, backend = setting.site, setting.backend
    ranks = setting.parallel.shards if backend.sharded else site.d
    own = nbytes / ranks
    copies = 2 * site.collective(own, site.d // ranks, site.t * ranks)
    away = own / site.host if backend.offload else 0.0
    return site.collective(nbytes, ranks, site.t) + copies + away
