"""What pipelines of many micro-batches hold. Called by the test beside it.

python stage_memory_cases.py MICRO_BATCHES 2 FOLDER
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import launch

from hpctrain.bench.ranks import leave_process_group
from hpctrain.launch import small_run
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.worker.standalone import open_loop

SPEC = DecoderSpec(layers=2, dim=256, heads=4, vocab=small_run.BYTES_VOCABULARY)
SEQUENCES, SEQ_LEN = 16, 128
"""Of a micro-batch; a message between the stages has 2 MB."""


def resident_bytes(which: str) -> int:
    found = re.search(rf"^{which}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def body(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """How far the peak of each rank is above what it held before its step."""
    micro_batches = int(sys.argv[1])
    plan = small_run.make_plan(2, 1, SPEC.layers, SEQUENCES, micro_batches)
    stages = [plan.stages[0].model_copy(update={"messages": "bf16"}), plan.stages[1]]
    _, loop = open_loop(rank, world, folder, plan.model_copy(update={"stages": stages}))
    built = resident_bytes("VmRSS")
    loop.one_step()
    peaks = [torch.zeros((), dtype=torch.int64) for _ in range(world)]
    dist.all_gather(peaks, torch.tensor(resident_bytes("VmHWM") - built))
    leave_process_group()
    return {"peaks": [int(peak) for peak in peaks]}


if __name__ == "__main__":
    launch(body, int(sys.argv[2]), sys.argv[3])
