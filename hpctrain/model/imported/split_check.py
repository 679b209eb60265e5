"""Checks that a block computes the same result when its linear layers are split as `model.tensor_parallel` says.

A wrong split often has fitting shapes (as a fused query-key-value matrix by columns) and trains another model. So the
split block is run, with one thread per device, and compared with the whole block.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.records.model.imported_spec import Split

TOLERANCE = 1e-4
"""Largest allowed difference between a split and a whole block in fp32, relative to the largest output."""
WAIT_S = 120.0


@dataclass
class _ThreadAllReduce:
    """An all-reduce among the threads that stand for devices."""

    barrier: threading.Barrier
    parts: list[Tensor]

    def __call__(self, rank: int, part: Tensor) -> Tensor:
        self.parts[rank] = part
        self.barrier.wait()
        total = torch.stack([part.detach() for part in self.parts]).sum(0)
        self.barrier.wait()
        # The sum of the other threads is added as a constant, so that autograd keeps only what one device would keep.
        return part + (total - part.detach())


class _RowParallelLinear(nn.Module):
    """One device's part of a linear layer that is split by rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, total: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias) if bias is not None else None
        self.total = total

    def forward(self, x: Tensor) -> Tensor:
        total = self.total(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


def run_split(
    block: nn.Module, x: Tensor, plan: dict[str, Split], tp: int, first: Callable[[nn.Module], Tensor]
) -> Tensor:
    """Run a block split over `tp` devices; return the output on the first device.

    Args:
        x: [batch, seq, dim], equal on every device.
        first: runs the forward pass of the first device, given its part of the block.

    Raises:
        Exception: the error that the block raised on one of the devices.
    """
    outputs: dict[int, Tensor] = {}
    errors: list[Exception] = []
    barrier = threading.Barrier(tp)
    shares = _shares(block, plan, tp, barrier)

    def work(rank: int) -> None:
        try:
            output = first(shares[0]) if rank == 0 else shares[rank](x)
            outputs[rank] = output.detach()
        except threading.BrokenBarrierError:
            pass  # another thread failed and reports its error
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    if errors:
        raise errors[0]
    return outputs[0]


def largest_difference(output: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value; infinite if the shapes differ."""
    if output.shape != expected.shape:
        return float("inf")
    return float((output - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def _shares(block: nn.Module, plan: dict[str, Split], tp: int, barrier: threading.Barrier) -> list[nn.Module]:
    sums = {name: _ThreadAllReduce(barrier, [torch.empty(0)] * tp) for name in plan}
    return [_share(block, plan, tp, rank, sums) for rank in range(tp)]


def _share(
    block: nn.Module, plan: dict[str, Split], tp: int, rank: int, sums: dict[str, _ThreadAllReduce]
) -> nn.Module:
    share = copy.deepcopy(block)
    for name, split in plan.items():
        linear = share.get_submodule(name)
        weight: Tensor = linear.weight.detach()  # type: ignore[operator]
        bias: Tensor | None = linear.bias  # type: ignore[assignment]
        if split == "rows":
            part = weight.chunk(tp, dim=1)[rank].clone()
            bias = None if bias is None else bias.detach()
            share.set_submodule(name, _RowParallelLinear(part, bias, partial(sums[name], rank)))
            continue
        linear.weight = nn.Parameter(weight.chunk(tp, dim=0)[rank].clone())
        linear.out_features = linear.weight.shape[0]  # type: ignore[assignment]
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().chunk(tp)[rank].clone())
    return share
