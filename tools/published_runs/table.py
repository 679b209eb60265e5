"""Reads measured runs of other frameworks from tables with one run per row."""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import FieldError, FileError, InputError

COLUMNS = (
    "id", "source", "framework", "model", "gpu", "num_gpus", "gpus_per_node", "intra_node", "inter_node", "layers",
    "hidden", "heads", "ffn", "seq", "vocab", "global_batch", "micro_batch", "tp", "pp", "dp", "vpp", "schedule",
    "recompute", "seq_parallel", "zero", "dtype", "iter_time_s", "peak_mem_GiB", "heterogeneous", "plan_detail",
    "notes",
)  # fmt: skip
"""Columns that a table of runs must have."""
FAMILIES = (
    ("korthikanti", "Korthikanti"),
    ("ground_truth_multi", "vTrain multi-node"),
    ("ground_truth_single", "vTrain single node"),
    ("sailor", "Sailor"),
    ("amp", "AMP"),
    ("bigscience", "BigScience"),
    ("llm-foundry", "llm-foundry"),
    ("dt-fm", "DT-FM"),
)
"""(whole word in the source column, name of the family)"""
WORD = r"(?<![a-z0-9-]){}(?![a-z0-9-])"
"""Pattern of a whole word of lower-case letters; an underscore or a dot may stand beside it, as in file names."""
SCHEDULES = ("1f1b", "interleaved-1f1b", "gpipe")
NVIDIA_SMI_GB = 1000 * 2**20
"""Bytes of a GB in BigScience's table: 1000 of the MiB that nvidia-smi shows. GB of 1024 MiB are ruled out by a run of
80 GB, because an A100 has 81,251 MiB in all, which would round to 79."""
LEAVING_OUT = (
    (re.compile(r"SUSPECT|ODD:"), "the table says that it is suspect"),
    (re.compile(r"random placement|placement by the"), "the table does not state where its ranks were"),
    (re.compile(r"column Central PS"), "it sums gradients on a central server"),
    (re.compile(r"Result of Megatron \(2022/04/26\)"), "the publication's own table has other times for such plans"),
    (re.compile(r"micro-batch 1 by the shared settings|\(not stated\)"), "the table assumes its plan"),
    (re.compile(r"\bcp=(?!1\b)\d"), "it splits sequences over GPUs (context parallelism), which a plan cannot say"),
)
"""(pattern in the notes of a row, why the run is left out)"""


@dataclass(frozen=True)
class MeasuredRun:
    """One run of the table, with its model, hardware, plan and measured time."""

    id: str
    family: str
    """Publication that the run is from, for vTrain with the part of its runs."""
    framework: str
    model: str
    gpu: str
    """GPUs as the table writes them: 'A100', '16xT4-16', '12xV100+4xT4'."""
    num_gpus: int
    node_sizes: tuple[int, ...]
    """[node] -> number of its GPUs in the run; empty if the table's text about them cannot be read."""
    intra_node: str
    """Links within a node, as the table writes them."""
    inter_node: str
    """Links between nodes, as the table writes them."""
    layers: int
    hidden: int
    """Width of the residual stream."""
    heads: int
    kv_heads: int
    """Key and value heads."""
    ffn: int
    """Width of the feed-forward layer."""
    gated: bool
    """Whether the feed-forward layer is gated, so that it has three matrices in place of two."""
    tied: bool
    """Whether embedding and head are one matrix."""
    seq_len: int
    vocab: int | None
    """Size of the vocabulary; None: the model has no head of that size, because its task is a classification."""
    rows: int
    """Sequences in a step."""
    micro_batch: int
    tp: int
    pp: int
    dp: int
    chunks: int
    """Virtual stages: stages on each pipeline rank."""
    schedule: str
    """Name of hpctrain's schedule that is the run's: 1f1b, interleaved_1f1b or gpipe."""
    recompute: str
    """none, selective or full."""
    recompute_stated: bool
    """Whether the table states `recompute`."""
    sequence_parallel: bool
    zero: int
    """Level of ZeRO, 0 to 3."""
    half: bool
    """Whether matrix products are in half precision."""
    bf16: bool
    """Whether this half precision is bf16."""
    reduced_bytes: int
    """Bytes of a number of the gradients that fully sharded replicas sum: 2, or 4 with `fsdp_mixed_precision=DEFAULT`
    and in fp32."""
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
    slow_nodes: bool
    """Whether the row's notes say that the nodes were later repaired and faster."""
    left_out: str | None
    """Why the row's notes say that the run is to be left out, or that no plan describes it; None if they do not."""

    @property
    def publication(self) -> str:
        """Name of the publication."""
        return self.family.split()[0]

    @property
    def problem(self) -> str:
        """Name of the group of similar runs to which the run belongs. Errors are averaged over such a group, and a
        fit holds out all of its runs together."""
        if self.family == "vTrain single node":
            return f"{self.family}, width {self.hidden}"
        if self.family == "vTrain multi-node":
            return f"{self.family}, {self.layers} × {self.hidden} on {self.num_gpus}"
        if self.family == "Sailor":
            return f"Sailor {self.model}, {self.card}"
        if self.family == "AMP":
            return f"AMP {self.gpu.split('(')[0].strip()}"
        if self.family == "BigScience":
            return f"BigScience on {self.num_gpus}"
        if self.family == "llm-foundry":
            return f"llm-foundry {self.card}, {'one node' if len(self.node_sizes) == 1 else 'several nodes'}"
        if self.family == "DT-FM":
            return f"DT-FM {self.framework.split(' (')[0]}, {self.inter_node.split(' (')[0]}"
        return self.family

    @property
    def card(self) -> str:
        """The GPUs without their count and form: 'GH-96', 'A100-40GB'; 'mixed GPUs' for several kinds."""
        return "mixed GPUs" if self.mixed else gpu_name(self.gpu).split(" (")[0].removesuffix("-SXM")

    @property
    def kind(self) -> str:
        """Name of the group of runs with one publication, one kind of GPU and one framework. Whole kinds are held out
        of a fit, as new machines and frameworks are."""
        return f"{self.publication}, {self.card}, {self.framework.split(' (')[0]}"

    @property
    def search(self) -> tuple[object, ...]:
        """Key of the runs that are plans for the same work on the same devices, and can be ranked against each
        other."""
        return (
            self.family, self.model, self.gpu, self.num_gpus, self.layers, self.hidden, self.heads, self.seq_len,
            self.rows, self.recompute, self.half, self.bf16, self.inter_node, self.slow_nodes,
        )  # fmt: skip


def gpu_name(text: str) -> str:
    """Return the GPU's name without its count: '16xGH-96' -> 'GH-96'."""
    return re.sub(r"^\d+x", "", text)


def read_tables(paths: Sequence[Path]) -> list[MeasuredRun]:
    """Return the runs of several tables, in the order of the tables.

    Raises:
        FileError: a table lacks a column, a field cannot be read, or two runs have one id.
        InputError: a table cannot be read.
    """
    runs: dict[str, MeasuredRun] = {}
    for path in paths:
        for run in read_runs(path):
            if run.id in runs:
                raise FileError(path, [FieldError(run.id, "id: found a second time; allowed: one run for each id")])
            runs[run.id] = run
    return list(runs.values())


def read_runs(path: Path) -> list[MeasuredRun]:
    """Return the runs of a table.

    Raises:
        FileError: the table lacks a column, or a field cannot be read.
        InputError: the file is missing or no CSV.
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
        except (ValueError, SyntaxError, KeyError, TypeError, AttributeError) as error:
            mistakes.append(FieldError(row.get("id") or "", f"cannot be read: {error}", line))
    if mistakes:
        raise FileError(path, mistakes)
    if not runs:
        raise FileError(path, [FieldError("", "there is no run in it; give a table of measured runs with --data")])
    return runs


def _run(row: Mapping[str, str]) -> MeasuredRun:
    source = row["source"].lower()
    named = (name for word, name in FAMILIES if re.search(WORD.format(re.escape(word)), source))
    family = next(named, row["source"].split("(")[0].strip())
    detail, notes = row["plan_detail"], row["notes"]
    stated = ast.literal_eval(detail) if detail.startswith("{") else None
    cuts = re.search(r"\[([\d, ]+)\]", detail) if detail.startswith("layer cuts") else None
    stages = None
    if stated is not None:
        stages = tuple(tuple((str(gpu), int(tp)) for gpu, tp in stage) for stage in stated["stages"])
    hidden, num_gpus = _whole(row, "hidden"), _whole(row, "num_gpus")
    heads, chunks = _whole(row, "heads", hidden // 64), _whole(row, "vpp", 1)
    half = "16" in row["dtype"].split()[0]
    schedule, peak = _one_of(row, "schedule", SCHEDULES, SCHEDULES[0]), _number(row, "peak_mem_GiB")
    return MeasuredRun(
        id=row["id"],
        family=family,
        framework=row["framework"],
        model=row["model"],
        gpu=row["gpu"],
        num_gpus=num_gpus,
        node_sizes=_node_sizes(row["gpus_per_node"], num_gpus),
        intra_node=row["intra_node"],
        inter_node=row["inter_node"],
        layers=_whole(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_note(notes, "kv_heads", heads),
        ffn=_whole(row, "ffn", 4 * hidden),
        gated=bool(_note(notes, "gated_ffn", 0)),
        tied=bool(_note(notes, "tied_embeddings", 1)),
        seq_len=_whole(row, "seq"),
        vocab=_whole(row, "vocab") if row["vocab"] else None,
        rows=_whole(row, "global_batch"),
        micro_batch=_whole(row, "micro_batch"),
        tp=_whole(row, "tp"),
        pp=_whole(row, "pp"),
        dp=_whole(row, "dp"),
        chunks=chunks,
        schedule="gpipe" if schedule == "gpipe" else "1f1b" if chunks == 1 else "interleaved_1f1b",
        recompute="full" if row["recompute"].startswith("full") else
        "selective" if row["recompute"].startswith("selective") else "none",
        recompute_stated=bool(row["recompute"].strip()),
        sequence_parallel=row["seq_parallel"] == "1",
        zero=int(_one_of(row, "zero", ("0", "1", "2", "3"), "0")),
        half=half,
        bf16=row["dtype"].startswith("bf16"),
        reduced_bytes=4 if not half or "fsdp_mixed_precision=DEFAULT" in notes else 2,
        step_s=_number(row, "iter_time_s"),
        peak_bytes=None if peak is None else peak * (NVIDIA_SMI_GB if family == "BigScience" else 2**30),
        mixed=row["heterogeneous"] == "1",
        stages=stages,
        units=tuple(stated["layers_per_stage(incl embed+head)"]) if stated is not None else None,
        cuts=tuple(int(edge) for edge in cuts[1].split(",")) if cuts else None,
        slow_nodes="before the PCIe/NUMA fix" in notes,
        left_out=next((reason for pattern, reason in LEAVING_OUT if pattern.search(notes)), None),
    )  # fmt: skip


def _whole(row: Mapping[str, str], column: str, default: int | None = None) -> int:
    """Return the whole number with which a field begins, as in '51200 (assumed)' and '8/8'.

    Args:
        default: the number that an empty field stands for; None: the field may not be empty.

    Raises:
        ValueError: the field is empty and has no default, or begins with no whole number of at least 1.
    """
    text = row[column].strip()
    if not text and default is not None:
        return default
    match = re.match(r"(\d+)(?![\d.])", text)
    if match is None or int(match[1]) < 1:
        empty = " or nothing" if default is not None else ""
        raise ValueError(f"{column}: found {text!r}; allowed: a whole number of at least 1{empty}")
    return int(match[1])


def _number(row: Mapping[str, str], column: str) -> float | None:
    """Return a field as a number above 0; None for an empty field.

    Raises:
        ValueError: the field is not empty and no such number.
    """
    text = row[column].strip()
    if not text:
        return None
    if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", text) or float(text) <= 0:
        raise ValueError(f"{column}: found {text!r}; allowed: a number above 0 or nothing")
    return float(text)


def _one_of(row: Mapping[str, str], column: str, allowed: Sequence[str], default: str) -> str:
    """Return a field in lower case, or `default` for an empty field.

    Raises:
        ValueError: the field is neither empty nor one of `allowed`.
    """
    text = row[column].strip().lower() or default
    if text not in allowed:
        raise ValueError(f"{column}: found {row[column]!r}; allowed: {', '.join(allowed)} or nothing")
    return text


def _note(notes: str, key: str, default: int) -> int:
    """Return the number of `key=number` in the notes of a row, or `default` without it."""
    match = re.search(rf"(?<!\w){key}=(\d+)\b", notes)
    return int(match[1]) if match else default


def _node_sizes(text: str, num_gpus: int) -> tuple[int, ...]:
    """Return [node] -> number of its GPUs, from the number of GPUs of each node ('8') or from a text like '4 (8 nodes)
    and 1 (32 nodes)'; empty if the text is neither, or its nodes do not have `num_gpus` GPUs."""
    if re.fullmatch(r"[1-9]\d*", text):
        size = int(text)
        return tuple(min(size, num_gpus - start) for start in range(0, num_gpus, size))
    stated = [(int(size), int(count)) for size, count in re.findall(r"(\d+) \((\d+) nodes?\)", text)]
    sizes = tuple(size for size, count in stated for _ in range(count))
    return sizes if sum(sizes) == num_gpus else ()
