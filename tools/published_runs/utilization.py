"""Which share of their GPUs' data sheets published runs reached (MFU), and how often a range of it holds for a
publication that it was not taken from. The quantiles are the constants of `hpctrain.jobs.data_sheet_time`."""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hpctrain.base.errors import InputError
from hpctrain.probe.measure.data_sheet import peak_flops
from hpctrain.records.model.families import Gpt2Spec

FILES = ("measured_runs.csv", "measured_runs_2.csv")
QUANTILES = (0.1, 0.5, 0.9)
SOURCES = (
    ("Korthikanti", "Korthikanti"), ("vTrain", "vTrain"), ("AMP", "AMP"), ("BigScience", "BigScience"),
    ("llm-foundry", "llm-foundry"), ("DT-FM", "DT-FM"),
)  # fmt: skip
"""(word in the source column, publication). Sailor's runs are in fp32 and do not count."""
CLUSTER_NETWORK = re.compile(r"^(25|10) Gb/s Ethernet per node")
"""DT-FM's networks that a cluster may have; the others are of several data centres, or slowed down on purpose."""


@dataclass(frozen=True)
class ReachedShare:
    """The best measured run of one problem: one model, batch and number of GPUs of one publication."""

    publication: str
    problem: tuple[str, ...]
    parameters: float
    mfu: float


def best_runs(folder: Path) -> list[ReachedShare]:
    """Return the best run of each problem in the tables of published runs, for the planner too takes the best plan.

    Rows that are marked as odd or suspect, mixed GPUs, runs in fp32 and networks of several data centres are left out.

    Args:
        folder: folder with the tables `FILES`.

    Raises:
        InputError: a table cannot be read.
    """
    best: dict[tuple[str, ...], ReachedShare] = {}
    for name in FILES:
        try:
            with (folder / name).open(newline="", encoding="utf-8") as stream:
                rows = list(csv.DictReader(stream))
        except OSError as error:
            raise InputError(f"{folder / name}: {error.strerror}; set HPCTRAIN_DATA to the folder of tables") from None
        for row in rows:
            share = _share_of(row)
            if share is not None and (share.problem not in best or best[share.problem].mfu < share.mfu):
                best[share.problem] = share
    return list(best.values())


def _share_of(row: Mapping[str, str]) -> ReachedShare | None:
    publication = next((name for word, name in SOURCES if word in row["source"]), None)
    peak = peak_flops(re.sub(r"^\d+x", "", row["gpu"]))
    is_odd = "ODD:" in row["notes"] or "SUSPECT" in row["notes"] or row["heterogeneous"] == "1"
    if publication is None or peak is None or is_odd or not row["iter_time_s"] or "fp32" in row["dtype"]:
        return None
    if publication == "DT-FM" and not CLUSTER_NETWORK.match(row["inter_node"]):
        return None
    dim, seq_len = _number(row["hidden"]), _number(row["seq"])
    spec = Gpt2Spec(
        family="gpt2", layers=_number(row["layers"]), dim=dim, heads=_number(row["heads"]),
        ffn_dim=_number(row["ffn"], 4 * dim), vocab=_number(row["vocab"], 2), positions=seq_len,
    )  # fmt: skip
    flops = 3 * spec.forward_flops(_number(row["global_batch"]), seq_len)
    columns = ("model", "gpu", "num_gpus", "layers", "hidden", "seq", "global_batch", "inter_node")
    return ReachedShare(
        publication,
        (publication, *(row[name] for name in columns)),
        spec.parameters(),
        flops / float(row["iter_time_s"]) / int(row["num_gpus"]) / peak,
    )


def _number(text: str, default: int = 1) -> int:
    """Return the whole number with which a cell begins, as in '51200 (assumed)'; `default` for an empty cell. Without
    a vocabulary (DT-FM's task has no head) the model has one of 2."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else default


def quantiles(shares: Sequence[ReachedShare]) -> tuple[float, ...]:
    """Return the quantiles `QUANTILES` of MFU, with the same weight for each publication."""
    return weighted_quantiles([(share.publication, share.mfu) for share in shares])


def weighted_quantiles(values: Sequence[tuple[str, float]]) -> tuple[float, ...]:
    """Return the quantiles `QUANTILES` of the values of (publication, value), with the same weight for each
    publication."""
    counts = Counter(publication for publication, _ in values)
    ordered = sorted(values, key=lambda item: item[1])
    summed = np.cumsum([1 / counts[publication] for publication, _ in ordered]) / len(counts)
    picked = np.minimum(np.searchsorted(summed, QUANTILES), len(values) - 1)
    return tuple(float(ordered[index][1]) for index in picked)


def summarize(shares: Sequence[ReachedShare]) -> dict[str, Any]:
    """Return the quantiles, and by publication: problems, median, and the share of its problems within the range of
    all other publications."""
    by_publication: dict[str, list[ReachedShare]] = defaultdict(list)
    for share in shares:
        by_publication[share.publication].append(share)
    rows = {}
    for name, held_out in by_publication.items():
        low, _, high = quantiles([share for share in shares if share.publication != name])
        within = [low <= share.mfu <= high for share in held_out]
        middle = float(np.median([share.mfu for share in held_out]))
        rows[name] = {"problems": len(held_out), "median": middle, "within": sum(within) / len(within)}
    inside = sum(row["within"] * row["problems"] for row in rows.values())
    return {
        "quantiles": quantiles(shares),
        "least_parameters": min(share.parameters for share in shares),
        "publications": rows,
        "within_of_problems": inside / len(shares),
        "within_of_publications": sum(row["within"] for row in rows.values()) / len(rows),
    }


def show_utilization(record: Mapping[str, Any], console: Console) -> None:
    """Print the result of `summarize` as a table."""
    table = Table("publication", "problems", "median MFU", "within the others' range", title="best run of each problem")
    for name, row in record["publications"].items():
        table.add_row(name, str(row["problems"]), f"{row['median']:.1%}", f"{row['within']:.0%}")
    console.print(table)
    low, middle, high = record["quantiles"]
    console.print(
        f"MFU {middle:.1%}, {low:.1%} to {high:.1%}; a range that was taken without a publication holds for "
        f"{record['within_of_problems']:.0%} of the problems, in the mean of publications for "
        f"{record['within_of_publications']:.0%}; "
        f"smallest model {record['least_parameters']:,} parameters",
        soft_wrap=True,
    )
