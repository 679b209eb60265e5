"""Recomputation (Chen et al. 2016): what a block's forward pass keeps, and what its backward pass computes again.

Only the block's `forward` is wrapped. So parameter names do not change, and hooks on the block, as those of
`fully_shard`, do not run a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hpctrain.records.plan.plan import Recompute

_SAVED_NAMES = (
    "mm",
    "bmm",
    "addmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
SAVED_OPERATIONS = [getattr(torch.ops.aten, name).default for name in _SAVED_NAMES if hasattr(torch.ops.aten, name)]
"""Operations whose results selective recomputation keeps, because they are costly: matrix products, and attention under
the names of each kind of device.
"""


def recompute_blocks(blocks: list[nn.Module], level: Recompute) -> None:
    """Make the blocks keep less for their backward pass, in place.

    Args:
        blocks: the blocks of a stage.
        level: none: everything is kept. full: only the block's input is kept. selective: the block's input and the
            results of matrix products and attention are kept.
    """
    if level == "none":
        return
    for block in blocks:
        block.forward = _recomputed(block.forward, level)


def _recomputed(forward: Callable[..., Any], level: Recompute) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if level == "selective":
        options["context_fn"] = _selective

    @functools.wraps(forward)
    def recomputed(*args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **named)
        return checkpoint(functools.partial(forward, **named), *args, **options)

    return recomputed


def _selective() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(SAVED_OPERATIONS)
