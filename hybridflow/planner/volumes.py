"""Volumes: the bytes that a weight plan moves, counted without making the plan. Pure.

Bytes follow from who holds and who needs which rows of which layers, and from the rules of `engine3d.routes`: a rank
gets what it lacks from holders of its own node, evenly; into a node without holders a piece goes once and is passed on
there; to many ranks that have nothing to send themselves it goes like a chain. Searches ask for thousands of them.

Shapes: R ranks, N nodes, A parts of the model (runs of layers x parts of their rows).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridflow.engine3d.routes import WIDE

Floats = NDArray[np.floating]


def volumes(held_RA: Floats, needed_RA: Floats, bytes_A: Floats, nodes: Sequence[int]) -> tuple[float, float, int]:
    """Bytes of the busiest device inside its node (received or sent), of the busiest node's network, and the messages
    of the device that gets most.

    `held_RA` and `needed_RA` are 1 where a rank holds or needs a part, `nodes` [R] the node of each rank from 0.
    """
    at_R = np.array(nodes)
    on_NR: Floats = np.zeros((int(at_R.max()) + 1, len(at_R)), dtype=np.float32)
    on_NR[at_R, range(len(at_R))] = 1
    missing_RA = needed_RA * (1 - held_RA)
    idle_R: Floats = (held_RA.sum(axis=1) == 0).astype(np.float32)
    held_NA, wanted_NA, idle_NA = on_NR @ held_RA, on_NR @ missing_RA, (on_NR * idle_R) @ missing_RA
    enters_NA: Floats = ((wanted_NA > 0) & (held_NA == 0)).astype(np.float32)
    some_NA = np.maximum(wanted_NA, 1)

    gets_R = (missing_RA * (1 - (enters_NA / some_NA)[at_R])) @ bytes_A
    copies_NA = _copies(wanted_NA, idle_NA, held_NA)
    relays_NA = enters_NA * (wanted_NA - 1) / some_NA  # of what comes from outside, each rank passes on its share
    gives_R = (held_RA * copies_NA[at_R] + missing_RA * relays_NA[at_R]) @ bytes_A

    quiet_A = np.where(idle_NA == wanted_NA, enters_NA, 0).sum(axis=0, dtype=np.float32)
    entered_A, holders_A = enters_NA.sum(axis=0, dtype=np.float32), held_NA.sum(axis=0, dtype=np.float32)
    sent_A = _copies(entered_A, quiet_A, holders_A)
    between = max(float((enters_NA @ bytes_A).max()), float((held_NA @ (bytes_A * sent_A)).max()))
    return float(max(gets_R.max(), gives_R.max())), between, int(missing_RA.sum(axis=1).max())


def _copies(wanted: Floats, idle: Floats, held: Floats) -> Floats:
    """Copies that each of the `held` holders sends to `wanted` others, `idle` of which can pass them on."""
    holders = np.maximum(held, 1)
    copies = np.where(idle <= WIDE * held, wanted / holders, (wanted - idle) / holders + 1)
    return np.where(held > 0, copies, 0).astype(np.float32)
