"""Measures what dropout costs in a block of GPT-2 on one thread of the processor: dropout of torch, and dropout whose
masks are hashes of the elements' numbers, so that they do not depend on the plan (docs/decisions/0097).

    python -m tools.dropout_cost
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, SEQ, HEADS, DIM, RATE, REPEATS = 2, 512, 12, 768, 0.1, 8
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def counted(x: Tensor) -> Tensor:
    """Return x after a dropout whose mask is a 32-bit hash of each element's number."""
    bits = torch.arange(x.numel()).view(x.shape)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ (bits >> shift)) * factor & 0xFFFFFFFF
    return x * ((bits ^ (bits >> 16)) >= int(RATE * 2**32)) / (1 - RATE)


def fused(rate: float) -> Attend:
    """Return torch's causal attention with dropout of this rate."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention whose probabilities get a counted dropout."""
    later = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(DIM / HEADS)).masked_fill(later, -math.inf)
    return counted(scores.softmax(-1)) @ v


def milliseconds(attend: Attend, drop: Callable[[Tensor], Tensor]) -> float:
    """Return the shortest time of forward and backward pass of a block, in milliseconds.

    Args:
        attend: the block's attention.
        drop: dropout of what attention and feed-forward add to the residual stream.
    """
    norms, qkv = [nn.LayerNorm(DIM), nn.LayerNorm(DIM)], nn.Linear(DIM, 3 * DIM)
    out, up, down = nn.Linear(DIM, DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
    x = torch.randn(BATCH, SEQ, DIM, requires_grad=True)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in qkv(norms[0](x)).chunk(3, -1))
        y = x + drop(out(attend(q, k, v).transpose(1, 2).flatten(2)))
        (y + drop(down(F.gelu(up(norms[1](y)), approximate="tanh")))).sum().backward()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, attend, drop in (
        ("none", fused(0.0), lambda x: x),
        ("torch's", fused(RATE), lambda x: F.dropout(x, RATE)),
        ("counted, not in attention", fused(0.0), counted),
        ("counted", written_out, counted),
    ):
        print(f"{name:26} {milliseconds(attend, drop):7.1f} ms")
