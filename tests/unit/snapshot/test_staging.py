"""The writer's copy of a state: its own, whole, and in the same memory every time."""

from __future__ import annotations

import torch

from hpctrain.snapshot.staging import StagingBuffers


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), value), "b": torch.full((5, 2), value).t(), "empty": torch.zeros(0)}


def test_a_copy_does_not_follow_the_training() -> None:
    tensors = state(1.0)
    copy = StagingBuffers().copy(tensors)
    for tensor in tensors.values():
        tensor.fill_(2.0)
    assert all((tensor == 1.0).all() for tensor in copy.values())
    assert {name: tensor.shape for name, tensor in copy.items()} == {name: t.shape for name, t in tensors.items()}


def test_the_memory_is_kept() -> None:
    staging = StagingBuffers()
    staging.reserve(state(0.0))
    staging.warm(beside_cuda=False)
    first = {name: tensor.data_ptr() for name, tensor in staging.copy(state(1.0)).items()}
    second = staging.copy(state(2.0))
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == first
    assert all((tensor == 2.0).all() for tensor in second.values())


def test_a_tensor_of_another_shape_gets_memory_of_its_own() -> None:
    staging = StagingBuffers()
    staging.copy(state(1.0))
    other = staging.copy({"a": torch.full((7,), 3.0)})
    assert list(other) == ["a"]
    assert other["a"].tolist() == [3.0] * 7
