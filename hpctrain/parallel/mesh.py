"""The mesh of a plan, and the coordinate of each rank in it.

"Axis" is of the mesh (pp, dp, tp), "dim" is of a tensor, "node" is a machine, "rank" a process.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.records.plan.plan import Plan

AXES = ("pp", "dp", "tp")
HYBRID_AXES = ("pp", "replicate", "shard", "tp")


@dataclass(frozen=True)
class Coordinate:
    """The coordinate of a rank in the plan's mesh."""

    rank: int
    pp: int
    """Pipeline rank within its replica."""
    dp: int
    """Index of the replica."""
    tp: int
    """Position among the devices that share a stage's matrices."""

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Coordinate:
        """The coordinate of a global rank."""
        for pp, column in enumerate(plan.mesh()):
            for dp, row in enumerate(column):
                if rank in row:
                    return cls(rank, pp, dp, sorted(row).index(rank))
        raise ValueError(f"rank {rank} is not in a plan of {plan.world_size} ranks")


def build_mesh(plan: Plan, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
    """The plan's devices as a [pp, dp, tp] mesh; with hybrid sharding [pp, replicate, shard, tp]. Collective over all.

    Args:
        timeout: how long a collective along an axis waits for its members; torch's default for a mesh is half an hour.

    Ranks along tp are in ascending order, because torch orders the members of a process group that way and DTensor's
    shards follow the group. The shards are equal, so this does not change the plan.
    """
    ranks = torch.tensor([[sorted(row) for row in column] for column in plan.mesh()])
    names = HYBRID_AXES if 1 < plan.shards < plan.dp else AXES
    if names is HYBRID_AXES:
        ranks = ranks.view(plan.pp, plan.dp // plan.shards, plan.shards, plan.tp)
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=names)
    if timeout is not None:
        for axis in names:
            mesh.get_group(axis).set_timeout(timeout)
    return mesh


def sharding_mesh(mesh: DeviceMesh, plan: Plan) -> DeviceMesh:
    """The mesh for `fully_shard`: [shard], or with hybrid sharding [replicate, shard]. It is only [shard] if a codec
    sums over the replicate axis, because with both axes torch would do so itself."""
    if mesh.mesh_dim_names != HYBRID_AXES:
        return mesh["dp"]
    return mesh["shard"] if plan.codec_reduces_replicate_axis else mesh["replicate", "shard"]
