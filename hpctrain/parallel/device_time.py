"""Timing of a device without waiting for it.

A wait between two actions would end the overlap of computation with sends and with sums over replicas.
"""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event
"""A point in time: seconds on a CPU; on CUDA the event at which the current stream reached the point."""


def mark(device: torch.device) -> Mark:
    """Return this moment: on a CPU the time now; on CUDA the time at which the stream has done all work queued so
    far.
    """
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds from one mark to the other. On CUDA, wait until the device has reached the second mark."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float), "marks of one device are of one kind"
        assert isinstance(end, float), "marks of one device are of one kind"
        return end - start
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
