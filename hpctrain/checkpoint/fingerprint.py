"""One hash for the weights of a whole model, which does not depend on how the model is cut."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.base.errors import HpctrainError


def fingerprint(parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Return the SHA-256 over name, dtype, shape and bytes of every parameter in the order of their names, as hex.

    Collective over the world. A rank holds one whole tensor at a time and sends only digests.

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
    """Return the whole tensor. Collective over the mesh of a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _digest(name: str, tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
