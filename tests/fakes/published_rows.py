"""Tables of published runs made by hand, and the scenarios of their rows."""

from __future__ import annotations

import csv
from pathlib import Path

from tools.published_runs.sailor import SailorFigures
from tools.published_runs.scenario import PublishedScenario, scene_of
from tools.published_runs.table import COLUMNS, read_runs

NOTHING = SailorFigures({}, {})
ROW = {
    "id": "vtrain-single-9999", "source": "vTrain (MICRO24) data/ground_truth_single.csv", "framework": "Megatron",
    "model": "GPT", "gpu": "A100 (memory size not stated)", "num_gpus": "4", "gpus_per_node": "8",
    "intra_node": "NVLink", "inter_node": "", "layers": "12", "hidden": "1024", "heads": "16", "ffn": "4096",
    "seq": "1024", "vocab": "51200 (assumed)", "global_batch": "16", "micro_batch": "2", "tp": "1", "pp": "2",
    "dp": "2", "vpp": "1", "schedule": "1F1B", "recompute": "full (as configured)", "seq_parallel": "0", "zero": "",
    "dtype": "fp16",
    "iter_time_s": "0.2", "peak_mem_GiB": "", "heterogeneous": "0", "plan_detail": "", "notes": "",
}  # fmt: skip
SHARDED_STATE = {
    "source": "BigScience 176B (chronicles)", "gpu": "A100-80GB-SXM", "zero": "1", "notes": "kv_heads=16; cp=1",
}  # fmt: skip
DEEPSPEED = SHARDED_STATE | {"framework": "Megatron-DeepSpeed (BigScience)"}


def write(path: Path, rows: list[dict[str, str]], columns: tuple[str, ...] = COLUMNS) -> Path:
    """Write a table whose rows are `ROW` with other fields, and return its path."""
    with path.open("w", newline="") as stream:
        table = csv.DictWriter(stream, columns, extrasaction="ignore")
        table.writeheader()
        table.writerows([ROW | row for row in rows])
    return path


def scenes(tmp_path: Path, *rows: dict[str, str]) -> list[PublishedScenario]:
    """Return the scenarios of rows, all of which can be described."""
    found = [scene_of(run, NOTHING) for run in read_runs(write(tmp_path / "runs.csv", list(rows)))]
    assert not [reason for reason in found if isinstance(reason, str)]
    return [scene for scene in found if not isinstance(scene, str)]
