"""torch's all-gather into one tensor, whatever the installed version calls it."""

from __future__ import annotations

import torch.distributed as dist

# torch 2.13 warns of the old name, torch 2.11 does not have the new one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output [world · n], input [n], group, async_op): as `torch.distributed.all_gather_into_tensor`."""
