"""Relative positions of T5: a learned number for each head and each range of distances, added to attention scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def relative_position_bias(table: nn.Embedding, x: Tensor, largest: int, causal: bool) -> Tensor:
    """What is added to the scores of a sequence: [1, heads, seq, seq], minus infinity where causal attention sees
    nothing.

    Args:
        table: [buckets, heads], of a stack.
        x: [batch, seq, dim].
        largest: distance from which on no two are told apart.
    """
    seq = x.shape[1]
    # Scores of one distance get one number: 2·seq − 1 look-ups, laid out over the square by shifted windows.
    distances = torch.arange(1 - seq, seq, device=x.device)
    numbers = table(relative_position_buckets(distances, table.num_embeddings, largest, causal)).t()
    if causal:
        numbers = numbers.masked_fill(distances > 0, -math.inf)
    return numbers.unfold(1, seq, 1).flip(1)[None]


def relative_position_buckets(distances: Tensor, count: int, largest: int, causal: bool) -> Tensor:
    """Row of the table for each distance (position of the key minus that of the query).

    Near ones have rows of their own; the rest share rows on a logarithmic scale up to `largest`, and one from there on.
    Without a mask the rows are divided between both directions (Raffel et al. 2020, section 2.1).
    """
    offset = torch.zeros_like(distances)
    if causal:
        away = (-distances).clamp(min=0)
    else:
        count //= 2
        offset, away = (distances > 0).long() * count, distances.abs()
    near = count // 2
    # In this order, as powers of two fall on the edge of two rows: models that are published were trained with it.
    far = near + (torch.log(away.clamp(min=1).float() / near) / math.log(largest / near) * (count - near)).long()
    return offset + torch.where(away < near, away, far.clamp(max=count - 1))
