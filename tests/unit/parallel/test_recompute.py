"""Recomputation keeps less and computes again, and changes neither results nor names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.model.build import build_stage
from hpctrain.parallel.recompute import recompute_blocks
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.plan import Recompute

SPEC = DecoderSpec(layers=3, dim=64, heads=4, kv_heads=2, vocab=96)
ROWS, SEQ = 2, 32
PRODUCTS = 7
"""Matrix products of a block in fp32: q, k, v, output and the three of SwiGLU. Attention is one fused operation."""


class Watch(TorchDispatchMode):
    """Counts matrix products, and the bytes of results that are still alive, views of weights left out."""

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.products = 0
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func is torch.ops.aten.mm.default
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._weights:
                    self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_bytes(self) -> int:
        return sum(size for reference, size in self._storages.values() if not reference.expired())


def worked(level: Recompute) -> tuple[int, int, dict[str, Tensor]]:
    """Bytes kept after the forward of the blocks, products in the backward, and the gradients."""
    module = build_stage(SPEC, 0, SPEC.layers, seed=3)
    recompute_blocks(list(module.layers.children()), level)
    tokens = torch.randint(0, SPEC.vocabulary, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    x = module.embedding(tokens)
    with Watch(module.parameters()) as forward:
        for block in module.layers.values():
            x = block(x)
        kept = forward.live_bytes()
    with Watch() as backward:
        x.sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return kept, backward.products, gradients


@pytest.fixture(scope="module")
def of() -> dict[str, tuple[int, int, dict[str, Tensor]]]:
    levels: tuple[Recompute, ...] = ("none", "selective", "full")
    return {level: worked(level) for level in levels}


def test_the_more_is_recomputed_the_less_is_kept(of: dict[str, Any]) -> None:
    none, selective, full = (of[level][0] for level in ("none", "selective", "full"))
    assert full < 0.2 * none, (full, none)
    assert full < selective < 0.8 * none, (full, selective, none)
    # A block keeps its input: the output of the one before it.
    assert full == SPEC.layers * ROWS * SEQ * SPEC.dim * 4


def test_selective_repeats_no_matrix_product(of: dict[str, Any]) -> None:
    """Backward costs two products for each of the forward's; the last of a block is never needed again."""
    counted = {level: found[1] for level, found in of.items()}
    twice = 2 * PRODUCTS * SPEC.layers
    assert counted == {"none": twice, "selective": twice, "full": twice + (PRODUCTS - 1) * SPEC.layers}


@pytest.mark.parametrize("level", ["selective", "full"])
def test_gradients_and_names_are_the_same_bit_by_bit(level: str, of: dict[str, Any]) -> None:
    expected, found = of["none"][2], of[level][2]
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_without_gradients_nothing_is_wrapped_up() -> None:
    module = build_stage(SPEC, 0, SPEC.layers, seed=3)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with torch.no_grad():
        expected = module(tokens)
        recompute_blocks(list(module.layers.children()), "full")
        assert torch.equal(module(tokens), expected)
