"""torch's all-gather into one tensor, under the name that the installed version has."""

from __future__ import annotations

import torch.distributed as dist

# torch 2.13 warns about the old name; torch 2.11 does not have the new one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Called with (output [world · n], input [n], group, async_op), as `torch.distributed.all_gather_into_tensor`."""
