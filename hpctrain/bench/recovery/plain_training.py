"""A plain torch training loop with checkpoints, to compare with: the program that `hpctrain bench recovery` starts by
torchrun, and by srun in a job that Slurm requeues.

Model, batch and optimizer are those of the run of hpctrain. After every few steps rank 0 saves the state by
`torch.save`, and each start begins with the newest file. Rank 0 appends a line to `steps.jsonl` after each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from hpctrain.base.atomic import append_line, write_json
from hpctrain.model.build import build_stage
from hpctrain.records.model.decoder_spec import DecoderSpec

SETTINGS_FILE, STEPS_FILE, STATE_FILE = "training.json", "steps.jsonl", "state.pt"
JOIN_S = 120.0
"""Seconds that the ranks of one start wait for each other."""


@dataclass(frozen=True)
class PlainSettings:
    """Settings of the loop; `rows` are the sequences of the global batch, `save_every` the steps between two saves."""

    spec: DecoderSpec
    rows: int
    seq_len: int
    lr: float
    clip_norm: float
    save_every: int
    collective_timeout_s: float
    """Seconds after which a collective whose peer is silent fails."""

    def write(self, folder: Path) -> None:
        write_json(folder / SETTINGS_FILE, asdict(self) | {"spec": self.spec.model_dump(exclude_none=True)})

    @classmethod
    def read(cls, folder: Path) -> PlainSettings:
        return TypeAdapter(cls).validate_json((folder / SETTINGS_FILE).read_text())


def main(folder: Path) -> None:
    """Train until somebody ends the process. torchrun sets RANK and WORLD_SIZE; srun sets its own variables."""
    settings, environ = PlainSettings.read(folder), os.environ
    rank = int(environ["RANK"] if "RANK" in environ else environ["SLURM_PROCID"])
    world = int(environ["WORLD_SIZE"] if "WORLD_SIZE" in environ else environ["SLURM_NTASKS"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=JOIN_S))
    group = dist.new_group(timeout=timedelta(seconds=settings.collective_timeout_s))
    module = build_stage(settings.spec, 0, settings.spec.layers, 0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=settings.lr)
    step = _load(folder / STATE_FILE, module, optimizer)
    model = DistributedDataParallel(module, process_group=group)
    life, began = time.time_ns(), time.time()
    while True:
        step += 1
        loss = F.cross_entropy(*_outputs(model, settings, step, rank, world))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), settings.clip_norm)
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / world, group=group)
        now = time.time()
        if rank == 0:
            row = {"step": step, "life": life, "time_s": now, "step_time_s": now - began, "loss": float(mean)}
            append_line(folder / STEPS_FILE, json.dumps(row))
            if step % settings.save_every == 0:
                _save(folder / STATE_FILE, module, optimizer, step)
        began = time.time()


def _outputs(
    model: nn.Module, settings: PlainSettings, step: int, rank: int, world: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model's outputs and their targets, for this rank's share of the step's sequences."""
    numbers = torch.Generator().manual_seed(step)
    tokens = torch.randint(settings.spec.vocab or 2, (settings.rows, settings.seq_len + 1), generator=numbers)
    share = tokens.chunk(world)[rank]
    return model(share[:, :-1]).flatten(0, 1), share[:, 1:].flatten()


def _save(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    unfinished = path.with_suffix(".tmp")
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
    unfinished.replace(path)


def _load(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest saved state, if there is one. Return the number of its step, and 0 without a saved state."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
