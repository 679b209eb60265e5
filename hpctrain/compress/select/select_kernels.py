"""Selection by threshold on a GPU, with two Triton kernels.

The first kernel counts the numbers of each tile that reach the threshold. A cumulative sum of the counts gives the
offset of each tile's output. The second kernel finds these numbers again, and writes their positions and values to the
output from the offset on. The positions are ascending, and the output has the same bits in every run: it does not
depend on which tile finishes first.

Why two passes: positions must be ascending, for two reasons. A message may hold, in place of each position, the count
of numbers between it and the position before (`IndexForm.GAPS`). And runs must repeat bit by bit. One pass with a
shared counter (`atomic_add`) gives positions in the order in which tiles finish. One pass in which tiles wait for those
before them (decoupled look-back) needs programs that start in order, which Triton does not promise. torch's own
operations, even compiled, write magnitudes or masks and read them again. Selecting a share ρ moves 8 + 12·ρ bytes per
number, where a copy moves 8. No GPU has run the kernels, so their speed is not known.

Tested without a GPU: the kernels agree with the CPU implementation in Triton's interpreter, and Triton 3.9 compiles
them for sm_80, sm_90 and gfx942, with 16-byte loads where memory and length are multiples of 16. The first call
compiles both, in less than a second of CPU time.

Import this module only where Triton is installed and the numbers are on a GPU, because loading Triton takes time. If
the environment variable TRITON_INTERPRET is 1 when Triton is loaded, its interpreter runs the kernels on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Count of numbers that one program of a kernel reads."""
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""Launch options of the kernels.

With warps of 32 threads each thread has 16 numbers, four loads of four. `enable_fp_fusion` is set because Triton 3.9
warns about its default; the kernels have no products to fuse.
"""


def at_least(values: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions [k], int64, ascending, and the values [k], fp32, of the numbers whose magnitude reaches a
    threshold.

    NaN is never selected. The host waits for the device once, to read k.

    Args:
        values: [n], fp32, contiguous; n may be more than 2^31.
        threshold: [], fp32, above zero, on the same device.
    """
    tiles = triton.cdiv(values.numel(), TILE)
    if tiles == 0:
        return values.new_empty(0, dtype=torch.int64), values.new_empty(0)
    # Triton launches on the current device, even if its arguments are on another.
    with torch.cuda.device_of(values):
        counts = values.new_empty(tiles, dtype=torch.int32)
        _count[(tiles,)](values, threshold, counts, values.numel(), size=TILE, **_OPTIONS)
        ends = counts.cumsum(0)
        count = int(ends[-1])
        positions, numbers = values.new_empty(count, dtype=torch.int64), values.new_empty(count)
        if count:
            _write[(tiles,)](values, threshold, ends, positions, numbers, values.numel(), size=TILE, **_OPTIONS)
    return positions, numbers


# Triton's compiler reads annotations too, and the only name of this file that it knows is tl.
@triton.jit
def _count(values: tl.tensor, threshold: tl.tensor, counts: tl.tensor, n: int, size: tl.constexpr) -> None:
    tile = tl.program_id(0).to(tl.int64)
    places = tile * size + tl.arange(0, size)
    # A comparison with NaN is false, and so is that of the zeros after the end.
    passing = tl.abs(tl.load(values + places, mask=places < n, other=0.0)) >= tl.load(threshold)
    tl.store(counts + tile, tl.sum(passing.to(tl.int32), axis=0))


@triton.jit
def _write(
    values: tl.tensor, threshold: tl.tensor, ends: tl.tensor, positions: tl.tensor, numbers: tl.tensor, n: int,
    size: tl.constexpr,
) -> None:  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    places = tile * size + tl.arange(0, size)
    read = tl.load(values + places, mask=places < n, other=0.0)
    passing = tl.abs(read) >= tl.load(threshold)
    start = tl.load(ends + tile - 1, mask=tile > 0, other=0)
    target = start + tl.cumsum(passing.to(tl.int32), axis=0) - 1
    tl.store(positions + target, places, mask=passing)
    tl.store(numbers + target, read, mask=passing)
