"""The groups into which the layers of a model fall by their role, which can have codecs of their own."""

from __future__ import annotations

from typing import Literal, get_args

LayerGroup = Literal["embedding_head", "attention", "feed_forward"]
LAYER_GROUPS: tuple[LayerGroup, ...] = get_args(LayerGroup)
"""The layer groups; each parameter is in one of them."""


def layer_group(name: str) -> LayerGroup:
    """Return the layer group of a parameter.

    Args:
        name: as 'layers.3.attention.wq.weight'. Parameters of attention are in the group attention, also those of
            cross-attention; others of a numbered module, such as a block, in feed_forward; all others in
            embedding_head.
    """
    if in_attention(name):
        return "attention"
    return "feed_forward" if any(part.isdecimal() for part in name.split(".")) else "embedding_head"


def in_attention(name: str) -> bool:
    """Return whether a parameter belongs to a self-attention or cross-attention, by the name of its module. Models of
    your own count too: their attentions have names such as 'self_attn' or 'EncDecAttention'."""
    return any("attention" in part or "attn" in part for part in name.lower().split("."))
