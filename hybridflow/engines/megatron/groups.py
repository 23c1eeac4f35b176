"""Megatron's process groups from the rank grid: slices of one array, none of them global."""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection

from hybridflow.engines.process_groups import RankContext


def process_group_collection(context: RankContext) -> ProcessGroupCollection:
    """Every group that Megatron reads, for this rank. Groups with equal members are one group.

    There is neither context nor expert parallelism: those groups hold this rank alone. `embd` joins the two stages
    that have a copy of tied embeddings; without it Megatron would silently not add up their gradients.
    """
    grid, rank, at = context.grid, context.rank, context.coords

    def group(members: list[int]):
        return context.groups.new("megatron", members)

    alone, everyone, model = group([rank]), group(grid.ranks()), group(grid.group(rank, "p", "t"))
    tp, pp, dp = group(grid.group(rank, "t")), group(grid.group(rank, "p")), group(grid.group(rank, "d"))
    ends = [grid.rank(0, at.t, at.d), grid.rank(-1, at.t, at.d)]
    return ProcessGroupCollection(
        tp=tp,
        pp=pp,
        dp=dp,
        mp=model,
        cp=alone,
        dp_cp=dp,
        intra_dp_cp=dp,
        tp_cp=tp,
        tp_dp_cp=group(grid.group(rank, "t", "d")),
        hcp=[alone],
        ep=alone,
        expt_tp=tp,
        expt_dp=dp,
        intra_expt_dp=dp,
        tp_ep=tp,
        tp_ep_pp=model,
        inter_dist_opt=None,
        intra_dist_opt=everyone,
        embd=group(ends) if grid.p > 1 and rank in ends else None,
        pos_embd=None,
    )
