"""What the reducers of gradients keep from one step to the next, in checkpoints: each rank's own tensors, under names
of its place in the mesh."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from hpctrain.checkpoint.save_and_load import load_with_prefix
from hpctrain.compress.reducers.reducer import Reducer
from hpctrain.parallel.mesh import Coordinate
from hpctrain.records.history.manifest import Manifest
from hpctrain.records.plan.plan import Plan


def reducer_state_tensors(reducer: Reducer, place: Coordinate) -> dict[str, Tensor]:
    """The reducer's state under the names that it has in a checkpoint; shared memory."""
    return {_prefix(place) + key: tensor for key, tensor in reducer.state().items()}


def restore_reducer_state(
    reducer: Reducer, place: Coordinate, plan: Plan, manifest: Manifest, path: Path, group: dist.ProcessGroup
) -> str | None:
    """Take over what this rank's reducer kept when the checkpoint was written. Collective over the world.

    What one rank has not sent yet is of its own batches and its own part of the model, so it is of use only where the
    ranks, their parts and the codec are the same; on which devices they are does not matter.

    Returns:
        Why nothing was taken over, where there was something.

    Raises:
        CheckpointError: a tensor of it cannot be read.
    """
    if manifest.reduction_sha256 is None:
        return None
    if manifest.reduction_sha256 != plan.reduction_sha256:
        return (
            f"the checkpoint of step {manifest.step} is of another layout of ranks or another compression: what they "
            "had not sent yet of their gradients is dropped"
        )
    reducer.load_state(load_with_prefix(_prefix(place), path, group))
    return None


def _prefix(place: Coordinate) -> str:
    return f"compression.{place.pp}-{place.dp}-{place.tp}."
