"""`python -m hpctrain.worker torch`: what torch can do on this machine, as JSON on stdout."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist


def main(argv: list[str]) -> int:
    """Print torch's versions, backends and GPUs as JSON, and return 0."""
    del argv
    nccl = dist.is_available() and dist.is_nccl_available()
    state = {
        "version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "hip_version": torch.version.hip,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl_version": ".".join(str(part) for part in torch.cuda.nccl.version()) if nccl else None,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }
    print(json.dumps(state))
    return 0
