"""Relative positions of T5: a learned number per head and range of distances, added to the attention scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def relative_position_bias(table: nn.Embedding, x: Tensor, largest: int, causal: bool) -> Tensor:
    """Return the bias that is added to the scores of a sequence: [1, heads, seq, seq].

    It is minus infinity where causal attention is masked.

    Args:
        table: [buckets, heads], of the encoder or the decoder.
        x: [batch, seq, dim].
        largest: distance from which on all distances share a bucket.
    """
    seq = x.shape[1]
    # All scores of one distance get one number, so 2·seq − 1 look-ups are enough; shifted windows make a square of
    # them.
    distances = torch.arange(1 - seq, seq, device=x.device)
    numbers = table(relative_position_buckets(distances, table.num_embeddings, largest, causal)).t()
    if causal:
        numbers = numbers.masked_fill(distances > 0, -math.inf)
    return numbers.unfold(1, seq, 1).flip(1)[None]


def relative_position_buckets(distances: Tensor, count: int, largest: int, causal: bool) -> Tensor:
    """Return the bucket, a row of the table, of each distance (position of the key minus that of the query).

    Small distances have a bucket each. Larger ones share buckets on a logarithmic scale up to `largest`; all distances
    from there on share one bucket. Without a causal mask, each direction gets half of the buckets (Raffel et al. 2020,
    section 2.1).
    """
    offset = torch.zeros_like(distances)
    if causal:
        away = (-distances).clamp(min=0)
    else:
        count //= 2
        offset, away = (distances > 0).long() * count, distances.abs()
    near = count // 2
    # Keep this order of operations: powers of two fall on the edge of two buckets, and published models use this order.
    far = near + (torch.log(away.clamp(min=1).float() / near) / math.log(largest / near) * (count - near)).long()
    return offset + torch.where(away < near, away, far.clamp(max=count - 1))
