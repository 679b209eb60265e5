"""Memory that is reused from call to call, because page faults of new memory take longer than writing to it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Scratch:
    """Temporary memory for one purpose, which `take` reuses on a CPU.

    On CUDA, `take` allocates, because torch's allocator reuses memory itself and knows which stream has finished with
    it.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._memory = torch.empty(0, dtype=dtype)

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return uninitialised memory of a shape on the device of `like`; on a CPU the next call returns the same
        memory.
        """
        if like.is_cuda:
            return like.new_empty(shape, dtype=self._memory.dtype)
        numbers = math.prod(shape)
        if self._memory.numel() < numbers:
            self._memory = self._memory.new_empty(numbers)
        return self._memory[:numbers].view(shape)


class BufferPool:
    """Pool of temporary memory, from which several buffers can be in use at a time; returned buffers are reused."""

    def __init__(self, same_size: bool = False, bounded: bool = False) -> None:
        """Create an empty pool.

        Args:
            same_size: whether `take` reuses a buffer only for requests of exactly its size; if False, for smaller ones
                too.
            bounded: whether a request that no free buffer fits drops one of the free buffers, so that there are never
                more buffers than were in use at one moment.
        """
        self._same_size, self._bounded = same_size, bounded
        self._free: list[Tensor] = []

    def take(self, numbers: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised buffer [numbers], which belongs to the caller until `give_back`.

        Args:
            numbers: count of numbers.
            like: a tensor on the pool's device; a pool serves one device.
            dtype: dtype of the buffer.
        """
        index = next((index for index, buffer in enumerate(self._free) if self._fits(buffer, numbers, dtype)), None)
        if index is not None:
            return self._free.pop(index).as_strided((numbers,), (1,))
        if self._bounded and self._free:
            del self._free[0]
        return like.new_empty(numbers, dtype=dtype)

    def _fits(self, buffer: Tensor, numbers: int, dtype: torch.dtype) -> bool:
        size = buffer.untyped_storage().nbytes() // buffer.element_size()
        return buffer.dtype == dtype and (size == numbers if self._same_size else size >= numbers)

    def give_back(self, *buffers: Tensor) -> None:
        """Take back buffers of `take` that the caller no longer uses."""
        self._free += buffers
