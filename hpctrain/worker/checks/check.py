"""`python -m hpctrain.worker check ORDER`: one process of one path of the selfcheck.

ORDER is a `CheckOrder` as JSON. Rank 0 writes the `CheckResult` to result.json in the folder that the order names. A
check that fails prints its error on stderr and ends with an exit code other than 0.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from hpctrain.records.history.selfcheck import CheckOrder, CheckResult
from hpctrain.worker.checks.device import check_attention, check_compression, check_device
from hpctrain.worker.checks.training import (
    check_all_reduce,
    check_checkpoint,
    check_compiled,
    check_plan,
    check_precision,
    check_reference,
)

RESULT_FILE = "result.json"
CHECKS = {
    "device": check_device,
    "attention": check_attention,
    "compression": check_compression,
    "all_reduce": check_all_reduce,
    "reference": check_reference,
    "plan": check_plan,
    "precision": check_precision,
    "compiled": check_compiled,
    "checkpoint": check_checkpoint,
}
"""Function of each check by its name in `CheckOrder`; it gets the order and returns the result."""


def main(argv: list[str]) -> int:
    """Run the check that the first of `argv` names (a `CheckOrder` as JSON), let rank 0 write the result, and return 0.
    The environment variable OMP_NUM_THREADS sets torch's number of threads."""
    order = CheckOrder.from_json(json.loads(argv[0]), "order")
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    result: CheckResult = CHECKS[order.check](order)
    if order.rank == 0:
        result.write(Path(order.folder) / RESULT_FILE)
    return 0
