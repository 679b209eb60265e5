"""Saves and restores the reducers' state in checkpoints: each rank's tensors, named by its mesh coordinate."""

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
    """Return the reducer's state under its names in a checkpoint. The tensors share the reducer's memory."""
    return {_prefix(place) + key: tensor for key, tensor in reducer.state().items()}


def restore_reducer_state(
    reducer: Reducer, place: Coordinate, plan: Plan, manifest: Manifest, path: Path, group: dist.ProcessGroup
) -> str | None:
    """Load the state that this rank's reducer had when the checkpoint was written. Collective over all ranks.

    A residual belongs to a rank's batches and its part of the model. It can be restored only if ranks, their parts and
    the codec are those of the checkpoint; the devices may differ.

    Returns:
        Why the state in the checkpoint was not loaded; None if it was loaded or there is none.

    Raises:
        CheckpointError: a tensor of the state cannot be read.
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
