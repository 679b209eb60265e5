"""The mesh of a plan, and the coordinate of each rank in the mesh.

In this module, an axis belongs to the mesh (pp, dp, tp) and a dim to a tensor.
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
    """The position of a rank on each axis of a plan's mesh."""

    rank: int
    pp: int
    """Pipeline rank within its replica."""
    dp: int
    """Index of the replica."""
    tp: int
    """Position in the tensor-parallel group."""

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Coordinate:
        """Return the coordinate of a global rank in the mesh of a plan.

        Raises:
            ValueError: the plan has fewer ranks.
        """
        return cls(rank, *plan.coordinate(rank))


def build_mesh(plan: Plan, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
    """Return the plan's mesh: [pp, dp, tp], or [pp, replicate, shard, tp] with hybrid sharding and with sums of
    gradients by level. Collective over all ranks.

    With sums by level, the ranks along shard are the replicas of a node. If the state is sharded over all replicas, the
    mesh also has the axis dp, which joins replicate and shard.

    Ranks along tp are in ascending order, because torch orders the members of a process group by rank, and DTensor's
    shards follow the order of the group. A matrix has equal shards, so the order does not change what a device
    computes.

    Args:
        plan: the plan.
        device_type: type of the ranks' devices, as 'cuda'.
        timeout: how long a collective along an axis waits for its members; None: torch's default for a mesh, half an
            hour.
    """
    ranks = torch.tensor([[sorted(row) for row in column] for column in plan.mesh()])
    group = plan.shards if 1 < plan.shards < plan.dp else plan.level_replicas
    names = AXES if group == 1 else HYBRID_AXES
    if names is HYBRID_AXES:
        ranks = ranks.view(plan.pp, plan.dp // group, group, plan.tp)
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=names)
    groups = [mesh.get_group(axis) for axis in names]
    if plan.shards == plan.dp and group > 1:
        groups.append(mesh["replicate", "shard"]._flatten("dp").get_group())
    if timeout is not None:
        for process_group in groups:
            process_group.set_timeout(timeout)
    return mesh


def reducer_sums_copies(plan: Plan, device_type: str) -> bool:
    """Return whether a reducer of hpctrain sums over the replicate axis, with hybrid sharding. On CUDA, torch's
    `fully_shard` does so in plans whose sums are exact: it has a stream for these sums.

    Args:
        device_type: type of the ranks' devices, as 'cuda'.
    """
    is_hybrid = 1 < plan.shards < plan.dp
    return is_hybrid and (plan.codec_reduces_replicate_axis or device_type == "cpu")


def sharding_mesh(mesh: DeviceMesh, plan: Plan) -> DeviceMesh:
    """Return the part of the plan's mesh that `fully_shard` gets: [dp], or with hybrid sharding [replicate, shard].

    With hybrid sharding and a reducer that sums over the replicate axis, the result is [shard]: with both axes torch
    would sum over the replicate axis as well.
    """
    if plan.shards == plan.dp:
        return mesh["dp"]
    return mesh["shard"] if reducer_sums_copies(plan, mesh.device_type) else mesh["replicate", "shard"]
