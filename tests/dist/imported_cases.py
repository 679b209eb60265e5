"""The example of docs/own-model.md under several plans; called by the test beside it.

python imported_cases.py WORLD FOLDER   every plan of that many ranks against one process
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples" / "own_model" / "code"))

from cases import EMBEDDING, HALF, SEED, SEQ, UNEVEN, WHOLE, make_plan, run_equivalence
from processes import launch, process_group

from hpctrain.model.imported.describe import DescribeRequest, describe

SPLIT = {
    "attention.wq": "columns",
    "attention.wk": "columns",
    "attention.wv": "columns",
    "attention.wo": "rows",
    "up": "columns",
    "down": "rows",
}
PLANS = {
    "pp2": make_plan(2, 1, 1, HALF, [(2, 4)]),
    "pp2 uneven": make_plan(2, 1, 1, UNEVEN, [(1, 8)]),
    "pp2 embedding alone": make_plan(2, 1, 1, EMBEDDING, [(2, 4)], "gpipe"),
    "dp2": make_plan(1, 2, 1, WHOLE, [(2, 3), (1, 2)]),
    "tp2": make_plan(1, 1, 2, WHOLE, [(4, 2)]),
    "tp2, two stages": make_plan(1, 1, 2, HALF, [(2, 4)], "interleaved_1f1b"),
}


def equivalence(folder: Path, rank: int, world: int) -> dict[str, Any]:
    arguments = {"layers": 4, "dim": 32, "heads": 4}
    spec = describe(DescribeRequest("gpt:make", arguments, None, None, None, SPLIT, 64, SEQ, SEED))
    with process_group(folder, rank, world):
        return {name: run_equivalence(plan, spec, rank) for name, plan in PLANS.items() if plan.world_size == world}


if __name__ == "__main__":
    launch(equivalence, int(sys.argv[2]), sys.argv[3])
