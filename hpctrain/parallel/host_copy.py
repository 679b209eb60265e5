"""A number that the host reads from a device without waiting for the work that was queued after the number's copy."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of one number from its device to the host, queued when the object is made.

    `float(tensor)` on CUDA waits until the device has done everything in its queue. `value` waits for the copy only, so
    that the device goes on with what was queued after the copy.
    """

    def __init__(self, number: Tensor) -> None:
        """Queue the copy of the number to the host.

        Args:
            number: a tensor with one element; nothing may write to it later.
        """
        self._number = number.detach()
        self._done: torch.cuda.Event | None = None
        if number.device.type == "cuda":
            # Only a copy into page-locked memory lets the host go on at once.
            self._number = torch.empty_like(self._number, device="cpu", pin_memory=True)
            self._number.copy_(number.detach(), non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(number.device))

    def value(self) -> float:
        """Return the number. On CUDA, wait until it is on the host."""
        if self._done is not None:
            self._done.synchronize()
        return float(self._number)
