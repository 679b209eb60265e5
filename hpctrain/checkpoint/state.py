"""The tensors of a training state under names that do not depend on how the model is cut.

model.<parameter> and, for each parameter, exp_avg.<parameter> and exp_avg_sq.<parameter> of AdamW. A tensor that is
split is a DTensor, so that torch.distributed.checkpoint reads it into any other split.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


def prepare_moments(parameters: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> None:
    """Make AdamW's state exist before the first step, as zeros, so that there is something to load into."""
    for _, parameter in parameters:
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def collect(parameters: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of this rank's state by name; they share memory with the model and the optimizer."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters:
        tensors[f"model.{name}"] = parameter.detach()
        for moment in MOMENTS:
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    return tensors


def set_optimizer_step(parameters: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, step: int) -> None:
    """Tell AdamW how many steps it has done (its bias correction depends on it)."""
    for _, parameter in parameters:
        optimizer.state[parameter]["step"].fill_(float(step))
