"""Times of what a device does, taken without waiting for it: a send or a sum over replicas goes on beside computation
only as long as nobody stops for the device between two actions."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event
"""A point in time: on CUDA, when the current stream came there."""


def mark(device: torch.device) -> Mark:
    """Now on CPU; on CUDA, when the device has done all that the current stream was given until now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """The time from one mark to the other; on CUDA it waits until the device has come to the second."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float), "marks of one device are of one kind"
        assert isinstance(end, float), "marks of one device are of one kind"
        return end - start
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
