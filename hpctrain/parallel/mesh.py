"""The mesh of a plan, and the coordinate of each rank in it.

In this module an axis belongs to the mesh (pp, dp, tp), a dim to a tensor; a node is a machine, a rank a process.
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
    """The coordinate of a rank in the mesh of a plan."""

    rank: int
    pp: int
    """Pipeline rank within its replica."""
    dp: int
    """Index of the replica."""
    tp: int
    """Position in the tensor-parallel group."""

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Coordinate:
        """The coordinate of a global rank."""
        for pp, column in enumerate(plan.mesh()):
            for dp, row in enumerate(column):
                if rank in row:
                    return cls(rank, pp, dp, sorted(row).index(rank))
        raise ValueError(f"rank {rank} is not in a plan of {plan.world_size} ranks")


def build_mesh(plan: Plan, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
    """Build the plan's mesh: [pp, dp, tp], or [pp, replicate, shard, tp] with hybrid sharding. Collective over all
    ranks.

    Ranks along tp are in ascending order, because torch orders the members of a process group by rank and DTensor's
    shards follow the group. The shards are equal, so this does not change the plan.

    Args:
        timeout: how long a collective along an axis waits for its members; None: torch's default for a mesh, half an
            hour.
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
    """Return the mesh for `fully_shard`: [shard], or with hybrid sharding [replicate, shard].

    With hybrid sharding and a codec it is [shard] too: the codec sums over the replicate axis, and with both axes torch
    would sum over it as well.
    """
    if mesh.mesh_dim_names != HYBRID_AXES:
        return mesh["dp"]
    return mesh["shard"] if plan.codec_reduces_replicate_axis else mesh["replicate", "shard"]
