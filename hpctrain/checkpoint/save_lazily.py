"""Writes tensors as a folder of torch's distributed checkpoints (DCP), each of them made only when it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from hpctrain.base.errors import HpctrainError, StorageError
from hpctrain.checkpoint.dcp_errors import failure_reason, first_failure, quiet_alone


class _LazyPlanner(dcp.DefaultSavePlanner):
    """DCP's planner of a save, which makes each tensor right before DCP writes it."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._make = make

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor that is written next."""
        return self._make(write_item.index.fqn)


def save_lazily(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, make: Callable[[str], Tensor]
) -> None:  # fmt: skip
    """Write tensors to an existing folder, one after the other, so that the memory holds only one tensor at a time.
    Collective, if torch.distributed has a process group; else this process writes alone.

    Args:
        shapes: name -> shape of the tensors that this rank writes; no other rank writes them.
        dtype: type of their numbers.
        make: returns the tensor of a name, on the CPU.

    Raises:
        StorageError: a file cannot be written.
        HpctrainError: `make` raised it.
    """
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    # torch 2.13 keeps the tensors of a file until the file is complete. So each tensor has a file of its own.
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=True, per_thread_copy_ahead=0)
    try:
        with quiet_alone():
            dcp.save(tensors, storage_writer=writer, planner=_LazyPlanner(make))
    except dcp.api.CheckpointException as error:
        cause = first_failure(error)[1]
        if isinstance(cause, HpctrainError):
            raise cause from None
        raise StorageError(failure_reason(error, folder)) from error
