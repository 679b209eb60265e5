"""The writer's copy of a state: its own, whole, and in the same memory every time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hpctrain.checkpoint.save import StagingBuffers


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
    staging.warm(torch.device("cpu"))
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


class Runtime:
    """A stand-in for CUDA's runtime that takes so many pieces of memory."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.calls: list[str] = []

    def set_device(self, device: torch.device) -> None:
        self.calls.append(f"device {device.index}")

    def register(self, pointer: int, size: int, flags: int) -> int:
        assert pointer != 0
        assert flags == 0
        self.calls.append(f"register {size}")
        return 0 if len(self.calls) <= 1 + self.limit else 2


def locked(monkeypatch: pytest.MonkeyPatch, limit: int) -> list[str]:
    """What is asked of CUDA when a state of 48, 40 and 0 bytes is locked for GPU 3."""
    runtime = Runtime(limit)
    monkeypatch.setattr(torch.cuda, "set_device", runtime.set_device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=runtime.register))
    staging = StagingBuffers()
    staging.reserve(state(0.0))
    staging.warm(torch.device("cuda", 3))
    return runtime.calls


def test_memory_is_locked_for_the_device_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device comes first, or the thread would open a context on GPU 0; nothing is asked for what is empty."""
    assert locked(monkeypatch, limit=2) == ["device 3", "register 48", "register 40"]


def test_memory_that_cannot_be_locked_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert locked(monkeypatch, limit=0) == ["device 3", "register 48"]
    assert capsys.readouterr().err.splitlines() == [
        "hpctrain worker: memory for checkpoints is not locked, so copies are slower: CUDA error 2"
    ]
