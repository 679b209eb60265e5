"""`hpctrain plan` with broken topology files: each gives a plan or one line with file and field, never a traceback or
a warning."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from hpctrain.base.errors import HpctrainError
from hpctrain.cli.commands.plan import plan_command
from hpctrain.records.plan.plan import Plan
from hpctrain.records.topology.pair_matrix import PairMatrix
from hpctrain.records.topology.topology import Topology

pytestmark = pytest.mark.usefixtures("short_annealing")

RUN = {
    "steps": 10,
    "model": {"dims": {"layers": 2, "dim": 64, "heads": 4, "vocab": 256}},
    "data": {"train": ["data"], "seq_len": 64},
    "batch": {"global": 2},
}
FIGURES = {
    "latency_s": {"min": 4e-6, "p50": 5e-6, "p95": 9e-6}, "isolated_bytes_per_s": 1e9, "loaded_bytes_per_s": 9e8,
    "concurrency": 1, "alpha_s": 5e-6, "beta_s_per_byte": 1e-9, "break_bytes": 4096, "jitter": 1.8, "n": 8,
    "backend": {"gloo": {"alpha_s": 8e-5, "beta_s_per_byte": 2e-9}},
}  # fmt: skip
DEVICES = [
    {
        "id": f"cpu{number}", "type": "core", "flops": {"fp32": 1e11, "bf16": 2e11}, "memory_bytes": 8e9,
        "memory_bytes_per_s": 1e10, "launch_s": 1e-6, "power_w": 50.0, "nic": f"eth{number}",
        "copy_bytes_per_s": {f"cpu{1 - number}": 1e10},
        "codec_s": {"bf16": 1e-9, "quantized": 2e-9, "topk": 4e-9, "power_sgd": 8e-9},
    }
    for number in range(2)
]  # fmt: skip
PAIRS = [("n0", "n1"), ("n0", "n2"), ("n1", "n2")]
GOOD: dict[str, Any] = json.loads(json.dumps({
    "schema": "hpctrain.topology/v1",
    "provenance": {"version": "0", "created": "2026-01-01T00:00:00Z", "transport": "tcp", "rounds_done": 3},
    "device_types": {"core": {"kind": "cpu", "name": "made by hand"}},
    "nodes": [
        {"id": f"n{number}", "addr": f"10.0.0.{number}", "devices": DEVICES, "intra_bytes_per_s": 5e9,
         "nics": [{"name": f"eth{card}", "bytes_per_s": 1e9, "numa": 0} for card in range(2)],
         "host_facts": {"cpus": 4, "memory_bytes": 10**10, "clock_offset_s": -1e-3, "clock_error_s": 1e-4}}
        for number in range(3)
    ],
    "fabric": {
        "classes": [
            {"id": "rack", "alpha_s": 5e-6, "beta_s_per_byte": 1e-9, "pairs": 1, "level": 1,
             "backend": FIGURES["backend"]},
            {"id": "other", "alpha_s": 9e-6, "beta_s_per_byte": 4e-9, "pairs": 2, "level": 0},
        ],
        "clusters": [{"id": "leaf", "members": ["n0", "n1"], "oversubscription": 2.0}],
        "links": [{"a": a, "b": b, "class": "rack", "ab": FIGURES, "ba": FIGURES} for a, b in PAIRS],
        "broken": [["n0", "n2"]],
    },
    "verdict": {"status": "warn", "exclude": []},
}))  # fmt: skip
ODD: list[Any] = [
    None, True, "", "x", "a:b", "../a", "a\n", 0, -1, 1, 0.5, 1e-320, 1e308, 10**30, math.nan, math.inf, -math.inf,
    [], {}, [[]],
]  # fmt: skip


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in the file; of a list only those of the first item."""
    if path:
        yield path
    keys = list(value) if isinstance(value, dict) else range(min(1, len(value))) if isinstance(value, list) else ()
    for key in keys:
        yield from _paths(value[key], (*path, key))


def _broken_files() -> Iterator[tuple[str, bytes]]:
    """What was done to the good file, and the broken file."""
    for path in _paths(GOOD):
        name = ".".join(map(str, path))
        *above, key = path
        for odd in ("deleted", "twice", *ODD):
            value = copy.deepcopy(GOOD)
            holder = value
            for part in above:
                holder = holder[part]
            if odd == "deleted":
                del holder[key]
            elif odd == "twice":
                if not isinstance(holder, list):
                    continue
                holder.append(holder[key])
            else:
                holder[key] = odd
            yield f"{name} {odd!r}", json.dumps(value).encode()


@pytest.fixture
def plan(tmp_path: Path) -> Callable[[bytes], str]:
    """plan(file) -> what `hpctrain plan --explain` says to this topology file: '' for a plan, else the error."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    topology, output = tmp_path / "topology.json", tmp_path / "plan.json"

    def run(data: bytes) -> str:
        topology.write_bytes(data)
        output.unlink(missing_ok=True)
        arguments = [str(tmp_path / "run.yaml"), "--topology", str(topology), "-o", str(output), "--explain"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = CliRunner().invoke(plan_command, arguments)
        if result.exception is None:
            made = Plan.read(output)
            assert made.predicted is not None
            assert 0 < made.predicted.step_time_s["total"] < math.inf
            return ""
        if not isinstance(result.exception, HpctrainError):
            raise result.exception
        assert not output.exists()
        return str(result.exception)

    return run


def _is_error(text: str) -> bool:
    """Whether a line names the file, the field in it, and what is wrong."""
    return (
        text.isprintable() and len(text) < 1000 and re.search(r"/topology\.json(:\d+)?: (\S+: )?\S", text) is not None
    )


def _check(plan: Callable[[bytes], str], files: Iterable[tuple[str, bytes]]) -> None:
    for change, data in files:
        try:
            said = plan(data)
        except Exception as error:
            raise AssertionError(f"{change}: {error!r}") from error
        assert [line for line in said.splitlines() if not _is_error(line)] == [], change


def test_the_good_file_is_planned_on(plan: Callable[[bytes], str]) -> None:
    assert plan(json.dumps(GOOD).encode()) == ""


@pytest.mark.slow
def test_a_topology_broken_in_hundreds_of_ways_gives_a_plan_or_one_line(plan: Callable[[bytes], str]) -> None:
    # Of 2,256 files each seventh, so that every field has its turn three times; all of them take minutes.
    _check(plan, itertools.islice(_broken_files(), 1, None, 7))


def test_a_topology_file_cut_off_or_in_another_encoding_is_one_line(plan: Callable[[bytes], str]) -> None:
    whole = json.dumps(GOOD).encode()
    files = [whole[: len(whole) * part // 9] for part in range(9)]
    files += [json.dumps(GOOD).encode("utf-16"), whole.replace(b"made by hand", b"\xff\xfe"), whole + whole, b"\0" * 9]
    for data in files:
        said = plan(data)
        assert _is_error(said), data[:40]


def test_nodes_without_devices_are_one_line(plan: Callable[[bytes], str]) -> None:
    value = copy.deepcopy(GOOD)
    for node in value["nodes"]:
        node["devices"] = []
    assert "/topology.json: nodes: found no device; run `hpctrain probe`" in plan(json.dumps(value).encode())


@pytest.mark.slow
@pytest.mark.parametrize("removed", [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]])
def test_no_plan_crosses_a_link_without_figures(
    plan: Callable[[bytes], str], tmp_path: Path, removed: list[int]
) -> None:
    value = copy.deepcopy(GOOD)
    value["fabric"]["classes"], value["fabric"]["broken"] = [], []
    value["fabric"]["links"] = [link for number, link in enumerate(value["fabric"]["links"]) if number not in removed]
    unknown = {frozenset(PAIRS[number]) for number in removed}

    said = plan(json.dumps(value).encode())

    if len(removed) == len(PAIRS):
        assert "/topology.json: fabric.links: no alpha_s and beta_s_per_byte between n0 and n1, nor between any" in said
        return
    assert said == ""
    made = Plan.read(tmp_path / "plan.json")
    assert [pair for pair in unknown if pair <= set(made.nodes)] == []
    assert any(note.startswith("Left out because the topology has no figures of links") for note in made.notes)


@pytest.mark.parametrize(("figure", "value"), [("bytes_per_s", np.inf), ("latency_p50_s", -1e-6), ("alpha_s", 1e30)])
def test_a_figure_in_the_pair_matrix_that_cannot_be_is_one_line(
    plan: Callable[[bytes], str], tmp_path: Path, figure: str, value: float
) -> None:
    matrix = PairMatrix(["n0", "n1", "n2"])
    matrix[figure][0, 2] = value
    Topology.from_json(GOOD).with_pairs(matrix).write(tmp_path / "topology.json")

    said = plan((tmp_path / "topology.json").read_bytes())

    assert f"{figure} from n0 to n2: found" in said
    assert _is_error(said)
