"""A compiled block against the plain one. Called by the test beside it.

python compile_cases.py all 1 FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from cases import SEED, SEQ, SPEC, batch, deviation, make_plan, my_rows, reference
from processes import launch, process_group
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from hpctrain.parallel.mesh import Coordinate, build_mesh
from hpctrain.parallel.pipeline import PipelineInputs, build_pipeline
from hpctrain.records.run.objective import NEXT_TOKEN
from hpctrain.schedule.resolve import schedule_of

ONE = SPEC.model_copy(update={"layers": 1})


def compiled(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """Deviations of two micro-batches from one process that compiles nothing."""
    # In this process: the pool of compiling processes takes longer to start than one block to compile.
    inductor.compile_threads = 1
    # Neither headers compiled ahead, for one kernel, nor trial programs for every vector instruction of this processor.
    inductor.cpp_cache_precompile_headers = False
    inductor.cpp.vec_isa_ok = False
    plan, expected = make_plan(1, 1, 1, [(0, 1)], [(4, 2)]), reference(ONE, NEXT_TOKEN)
    with process_group(folder, rank, world):
        coordinate, mesh = Coordinate.of(plan, rank), build_mesh(plan, "cpu")
        inputs = PipelineInputs(plan, ONE, schedule_of(plan, 0)[0], SEQ, SEED, torch.device("cpu"), compile=True)
        pipeline = build_pipeline(inputs, mesh, coordinate)
        loss = float(pipeline.step(*my_rows(plan, coordinate, batch(ONE, 0))))
        named = dict(pipeline.parameters())
        return {
            "names": sorted(named) == sorted(expected["parameters"]),
            "graphs": counters["stats"]["unique_graphs"],
            "safe_path": os.environ.get("PYTHONSAFEPATH"),
            "loss": abs(loss - expected["losses"][0]),
            "gradient": max(deviation(p.grad, expected["gradients"][name]) for name, p in named.items()),
        }


if __name__ == "__main__":
    launch({"all": compiled}[sys.argv[1]], int(sys.argv[2]), sys.argv[3])
