"""Randomness that is never stored: what a model draws (dropout) is a function of where in the training it draws it.

Before every forward of a micro-batch the generators are seeded by (seed, step, replica, stage, micro-batch). So a
resumed run draws what an uninterrupted one draws, the order in which a schedule runs the micro-batches does not matter,
replicas differ, and the devices that share a matrix (tp) draw alike. Another cut of the model or of the batch draws
other numbers of the same kind.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch


@dataclass
class RandomStream:
    """Seeds torch's generators for each micro-batch of a replica's step."""

    seed: int
    replica: int
    device: torch.device
    step: int = 0
    """Steps done; the loop keeps it."""

    def begin(self, stage: int, micro_batch: int) -> None:
        """Call before each forward of a stage."""
        value = stream_seed(self.seed, self.step, self.replica, stage, micro_batch)
        # torch.manual_seed asks every kind of device there may be: 100 us a call, where this takes 5.
        if self.device.type == "cuda":
            torch.cuda.manual_seed(value)
        torch.default_generator.manual_seed(value)


def stream_seed(seed: int, step: int, replica: int, stage: int, micro_batch: int) -> int:
    """A 63-bit seed; neighbouring arguments give unrelated ones."""
    packed = struct.pack("<Qqqqq", seed, step, replica, stage, micro_batch)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
