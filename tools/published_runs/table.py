"""Reads measured runs of other frameworks from a table with one run per row."""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import FieldError, FileError, InputError

COLUMNS = (
    "id", "source", "framework", "model", "gpu", "num_gpus", "gpus_per_node", "intra_node", "inter_node", "layers",
    "hidden", "heads", "ffn", "seq", "vocab", "global_batch", "micro_batch", "tp", "pp", "dp", "vpp", "recompute",
    "seq_parallel", "dtype", "iter_time_s", "peak_mem_GiB", "heterogeneous", "plan_detail", "notes",
)  # fmt: skip
"""Columns that a table of runs must have."""
FAMILIES = (
    ("korthikanti", "Korthikanti"),
    ("ground_truth_multi", "vTrain multi-node"),
    ("ground_truth_single", "vTrain single node"),
    ("sailor", "Sailor"),
    ("amp", "AMP"),
)
"""(word in the source column, name of the family)"""


@dataclass(frozen=True)
class MeasuredRun:
    """One run of the table, with its model, hardware, plan and measured time."""

    id: str
    family: str
    """Publication that the run is from."""
    framework: str
    model: str
    gpu: str
    """GPUs as the table writes them: 'A100', '16xT4-16', '12xV100+4xT4'."""
    num_gpus: int
    gpus_per_node: int
    intra_node: str
    """Links within a node, as the table writes them."""
    inter_node: str
    """Links between nodes, as the table writes them."""
    layers: int
    hidden: int
    """Width of the residual stream."""
    heads: int
    ffn: int
    """Width of the feed-forward layer."""
    seq_len: int
    vocab: int
    rows: int
    """Sequences in a step."""
    micro_batch: int
    tp: int
    pp: int
    dp: int
    chunks: int
    """Virtual stages: stages on each pipeline rank."""
    recompute: str
    """none, selective or full."""
    sequence_parallel: bool
    half: bool
    """Whether matrix products are in half precision."""
    step_s: float | None
    """Measured seconds of a step; None: the run failed."""
    peak_bytes: float | None
    """Measured peak memory in bytes; None: not measured."""
    mixed: bool
    """Whether the GPUs are of several kinds."""
    stages: tuple[tuple[tuple[str, int], ...], ...] | None
    """stages[stage][replica] = (GPU, tp); None if the row does not state it."""
    units: tuple[int, ...] | None
    """Layers of each stage, where embedding and head count as a layer each; None if the row does not state them."""
    cuts: tuple[int, ...] | None
    """Edges of the stages in AMP's 30 pipeline units; None if the row does not state them."""
    suspect: bool
    """Whether the table says that the row may be wrong."""

    @property
    def problem(self) -> str:
        """Name of the group of similar runs to which the run belongs. Errors are averaged over such a group, and a
        fit holds out all of its runs together."""
        if self.family == "vTrain single node":
            return f"{self.family}, width {self.hidden}"
        if self.family == "vTrain multi-node":
            return f"{self.family}, {self.layers} × {self.hidden} on {self.num_gpus}"
        if self.family == "Sailor":
            return f"Sailor {self.model}, {'mixed GPUs' if self.mixed else gpu_name(self.gpu)}"
        if self.family == "AMP":
            return f"AMP {self.gpu.split('(')[0].strip()}"
        return self.family

    @property
    def search(self) -> tuple[object, ...]:
        """Key of the runs that are plans for the same work on the same devices, and can be ranked against each
        other."""
        return (
            self.family, self.model, self.gpu, self.num_gpus, self.layers, self.hidden, self.seq_len, self.rows,
            self.recompute,
        )  # fmt: skip


def gpu_name(text: str) -> str:
    """Return the GPU's name without its count: '16xGH-96' -> 'GH-96'."""
    return re.sub(r"^\d+x", "", text)


def read_runs(path: Path) -> list[MeasuredRun]:
    """Read the table of runs.

    Raises:
        FileError: the file is missing, lacks a column, or a field cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
            if missing:
                text = f"columns are missing: {', '.join(missing)}; allowed: a table like data/measured_runs.csv"
                raise FileError(path, [FieldError("", text)])
            rows = list(enumerate(reader, 2))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as CSV: {error}; give a table of measured runs with --data") from None
    runs, mistakes = [], []
    for line, row in rows:
        try:
            runs.append(_run(row))
        except (ValueError, SyntaxError, KeyError, TypeError) as error:
            mistakes.append(FieldError(row.get("id") or "", f"cannot be read: {error}", line))
    if mistakes:
        raise FileError(path, mistakes)
    if not runs:
        raise FileError(path, [FieldError("", "there is no run in it; give a table of measured runs with --data")])
    return runs


def _run(row: Mapping[str, str]) -> MeasuredRun:
    family = next((name for word, name in FAMILIES if word in row["source"].lower()), row["source"].split("(")[0])
    detail = row["plan_detail"]
    stated = ast.literal_eval(detail) if detail.startswith("{") else None
    cuts = re.search(r"\[([\d, ]+)\]", detail) if detail.startswith("layer cuts") else None
    stages = None
    if stated is not None:
        stages = tuple(tuple((str(gpu), int(tp)) for gpu, tp in stage) for stage in stated["stages"])
    seq_len = int(row["seq"])
    hidden = int(row["hidden"])
    return MeasuredRun(
        id=row["id"],
        family=family,
        framework=row["framework"],
        model=row["model"],
        gpu=row["gpu"],
        num_gpus=int(row["num_gpus"]),
        gpus_per_node=int(row["gpus_per_node"]),
        intra_node=row["intra_node"],
        inter_node=row["inter_node"],
        layers=int(row["layers"]),
        hidden=hidden,
        heads=int(row["heads"] or hidden // 64),
        ffn=int(row["ffn"] or 4 * hidden),
        seq_len=seq_len,
        vocab=int(row["vocab"].split()[0]),
        rows=int(row["global_batch"]),
        micro_batch=int(row["micro_batch"]),
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        dp=int(row["dp"].split("/")[0]),
        chunks=int(row["vpp"] or 1),
        recompute="full" if row["recompute"].startswith("full") else
        "selective" if row["recompute"].startswith("selective") else "none",
        sequence_parallel=row["seq_parallel"] == "1",
        half="16" in row["dtype"].split()[0],
        step_s=float(row["iter_time_s"]) if row["iter_time_s"] else None,
        peak_bytes=float(row["peak_mem_GiB"]) * 2**30 if row["peak_mem_GiB"] else None,
        mixed=row["heterogeneous"] == "1",
        stages=stages,
        units=tuple(stated["layers_per_stage(incl embed+head)"]) if stated is not None else None,
        cuts=tuple(int(edge) for edge in cuts[1].split(",")) if cuts else None,
        suspect="SUSPECT" in row["notes"],
    )  # fmt: skip
