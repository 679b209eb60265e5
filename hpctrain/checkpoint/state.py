"""Names the tensors of a training state, and hashes the weights. Names and hashes do not depend on the plan: on stages,
sharding or tensor parallelism.

The names are model.<parameter> and, for AdamW's moments, exp_avg.<parameter> and exp_avg_sq.<parameter>. A split tensor
is a DTensor, so torch.distributed.checkpoint can load it into any other split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.base.errors import HpctrainError

MOMENTS = ("exp_avg", "exp_avg_sq")


def prepare_moments(
    parameters: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, fill: bool = True
) -> None:
    """Create AdamW's state before its first step, so that a checkpoint can be loaded into it. An existing state stays.

    Args:
        fill: whether the moments are set to 0; otherwise they are left uninitialised, because a state is loaded next.
    """
    make = torch.zeros_like if fill else torch.empty_like
    for _, parameter in parameters:
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for moment in MOMENTS:
                state[moment] = make(parameter, memory_format=torch.preserve_format)


def collect(parameters: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return name -> tensor for this rank's parameters ('model.…') and AdamW's moments ('exp_avg.…', 'exp_avg_sq.…').
    The tensors share memory with the model and the optimizer."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters:
        tensors[f"model.{name}"] = parameter.detach()
        for moment in MOMENTS:
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    return tensors


def set_optimizer_step(parameters: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set AdamW's count of its steps to `step`; its bias correction depends on this count."""
    for _, parameter in parameters:
        optimizer.state[parameter]["step"].fill_(float(step))


def fingerprint(parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Return the SHA-256, as hex, over name, dtype, shape and bytes of every parameter of the model, in the order of
    their names.

    Collective over all ranks. The ranks that share a split tensor gather it whole, one tensor at a time. All ranks then
    exchange the digests of their tensors, not the tensors.

    Args:
        parameters: the parameters on this rank, by name.

    Raises:
        HpctrainError: copies of a parameter differ between ranks.
    """
    by_name = {name: _digest(name, _whole(parameter.detach())) for name, parameter in parameters}
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, by_name)
    digests: dict[str, tuple[str, int]] = {}
    for rank, held in enumerate(everyone):
        for name, digest in held.items():
            known, other = digests.setdefault(name, (digest, rank))
            if known != digest:
                raise HpctrainError(f"ranks {other} and {rank} hold different weights: first in {name}")
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(bytes.fromhex(digests[name][0]))
    return whole.hexdigest()


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from its parts if it is a DTensor. Collective over the DTensor's mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _digest(name: str, tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
