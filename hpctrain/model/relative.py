"""Relative positions of T5: a learned number for each head and each range of distances, added to attention scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hpctrain.records.encoder_decoder_spec import EncoderDecoderSpec


class RelativePositions(nn.Embedding):
    """The table of a stack, shared by its blocks: [buckets, heads]."""

    def __init__(self, spec: EncoderDecoderSpec, causal: bool) -> None:
        super().__init__(spec.buckets, spec.heads)
        self.causal = causal
        self.max_distance = spec.max_distance

    def forward(self, length: Tensor) -> Tensor:
        """What is added to the scores of a sequence: [1, heads, seq, seq], minus infinity where causal attention sees
        nothing.

        Args:
            length: a tensor [batch, seq, …] of that length.
        """
        seq = length.shape[1]
        # Scores of one distance get one number: 2·seq − 1 look-ups, laid out over the square by shifted windows.
        distances = torch.arange(1 - seq, seq, device=length.device)
        table = super().forward(buckets(distances, self.num_embeddings, self.max_distance, self.causal)).t()
        if self.causal:
            table = table.masked_fill(distances > 0, -math.inf)
        return table.unfold(1, seq, 1).flip(1)[None]


def buckets(distances: Tensor, count: int, largest: int, causal: bool) -> Tensor:
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
    scale = (count - near) / math.log(largest / near)
    far = near + (torch.log(away.clamp(min=1).float() / near) * scale).long()
    return offset + torch.where(away < near, away, far.clamp(max=count - 1))
