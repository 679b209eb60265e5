"""A checkpoint of torch (DCP) whose tensors are made one after the other."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hpctrain.base.errors import CheckpointError, StorageError
from hpctrain.checkpoint.save_lazily import save_lazily

SHAPES = {"a.weight": (3, 4), "b": (5,), "c.0.d": (2, 2, 2)}


def made(name: str) -> Tensor:
    seed = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=seed).bfloat16()


def test_torch_reads_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    save_lazily(tmp_path / "dcp", SHAPES, torch.bfloat16, made)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    dcp.load(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    assert whole.keys() == SHAPES.keys()
    for name in SHAPES:
        assert torch.equal(tensors[name], made(name))
        assert torch.equal(whole[name], made(name))


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    earlier: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def make(name: str) -> Tensor:
        alive.append(sum(known() is not None for known in earlier))
        tensor = torch.ones(SHAPES[name])
        earlier.append(weakref.ref(tensor))
        return tensor

    save_lazily(tmp_path, SHAPES, torch.float32, make)
    assert len(alive) == 3
    assert max(alive) <= 1  # torch's loop drops a tensor when it has the next one


def test_the_error_of_a_tensor_is_the_error_of_the_save(tmp_path: Path) -> None:
    def make(name: str) -> Tensor:
        raise CheckpointError(f"{name} is gone")

    with pytest.raises(CheckpointError, match="is gone"):
        save_lazily(tmp_path, SHAPES, torch.float32, make)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "__0_1.distcp").mkdir()
    with pytest.raises(StorageError) as error:
        save_lazily(tmp_path, SHAPES, torch.bfloat16, made)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{tmp_path}: rank 0 cannot write: ")
