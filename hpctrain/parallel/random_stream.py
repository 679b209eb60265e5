"""Random numbers without stored state: what a model draws (dropout) depends only on its position in the training.

Before every forward of a micro-batch the generators are seeded by (seed, step, replica, stage, micro-batch). So a
resumed run draws the numbers of an uninterrupted one, and the schedule's order of micro-batches does not matter.
Replicas draw different numbers, and the devices of a tensor-parallel group draw equal ones. With another cut of the
model or of the batch, the numbers differ but come from the same distribution.
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
    """Number of steps done; the training loop updates it."""

    def begin(self, stage: int, micro_batch: int) -> None:
        """Seed the generators; call it before each forward of a stage."""
        value = stream_seed(self.seed, self.step, self.replica, stage, micro_batch)
        # torch.manual_seed seeds every kind of device and takes 100 us a call; seeding one kind takes 5 us.
        if self.device.type == "cuda":
            torch.cuda.manual_seed(value)
        torch.default_generator.manual_seed(value)


def stream_seed(seed: int, step: int, replica: int, stage: int, micro_batch: int) -> int:
    """Return a 63-bit seed; neighbouring arguments give unrelated seeds."""
    packed = struct.pack("<Qqqqq", seed, step, replica, stage, micro_batch)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
