"""Host memory for the copy of a training state that the checkpoint writer reads; it is reused from save to save.

Fresh memory costs more than the copy itself, because the kernel maps and clears it page by page. So the memory is
allocated once, on the writer's thread while the training computes, and each save only copies into it. With a CUDA
device the memory is pinned, so that the device copies at the full rate of its link.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class StagingBuffers:
    """Host memory for one copy of a state, by tensor name; as large as the state."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, tensors: dict[str, Tensor]) -> None:
        """Allocate memory for tensors of these shapes. This is cheap: the kernel maps pages when they are written."""
        for name, tensor in tensors.items():
            known = self._buffers.get(name)
            if known is None or not _alike(known, tensor):
                self._buffers[name] = torch.empty_like(tensor.detach(), device="cpu")

    def warm(self, device: torch.device) -> None:
        """Write to all of the memory once, so that the kernel maps it. Call it on another thread before the first
        `copy`.

        Args:
            device: device of the tensors.
        """
        memory = [local_part(buffer).zero_() for buffer in self._buffers.values()]
        if device.type == "cuda":
            _lock_in_place(memory, device)

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors' current values; the result is valid until the next call."""
        self.reserve(tensors)
        sources = [local_part(tensor.detach()) for tensor in tensors.values()]
        targets = [local_part(self._buffers[name]) for name in tensors]
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        if any(source.is_cuda for source in sources):
            torch.cuda.synchronize()
        return {name: self._buffers[name] for name in tensors}


def _lock_in_place(tensors: list[Tensor], device: torch.device) -> None:
    """Pin memory with CUDA. If the system refuses (a limit on locked memory), copies are only slower."""
    # A thread starts on GPU 0, and its first CUDA call would open a context there, which takes memory.
    torch.cuda.set_device(device)
    cuda = torch.cuda.cudart()
    for tensor in tensors:
        if tensor.numel() == 0:
            continue  # a rank may hold no part of a parameter
        code = int(cuda.cudaHostRegister(tensor.data_ptr(), tensor.numel() * tensor.element_size(), 0))
        if code != 0:
            print(
                f"hpctrain worker: memory for checkpoints is not locked, so copies are slower: CUDA error {code}",
                file=sys.stderr,
            )
            return


def _alike(buffer: Tensor, tensor: Tensor) -> bool:
    a, b = local_part(buffer), local_part(tensor)
    return a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
