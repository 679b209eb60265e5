"""Names the tensors of a training state so that the names do not depend on how the model is cut.

The names are model.<parameter> and, for AdamW's moments, exp_avg.<parameter> and exp_avg_sq.<parameter>. A split tensor
is a DTensor, so that torch.distributed.checkpoint can load it into any other split.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


def prepare_moments(parameters: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> None:
    """Create AdamW's state as zeros before the first step, so that a checkpoint can be loaded into it."""
    for _, parameter in parameters:
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def collect(parameters: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all tensors of this rank's state by name; they share memory with model and optimizer."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters:
        tensors[f"model.{name}"] = parameter.detach()
        for moment in MOMENTS:
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    return tensors


def set_optimizer_step(parameters: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set AdamW's number of steps done, on which its bias correction depends."""
    for _, parameter in parameters:
        optimizer.state[parameter]["step"].fill_(float(step))
