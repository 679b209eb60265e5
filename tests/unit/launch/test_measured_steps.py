"""The time of a step comes from the newest run that did the same work on nodes of the job."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from run_folders import RUN, submitted_run

from hpctrain.launch.preflight.measured_steps import measured_step
from hpctrain.records.run.run import Run
from hpctrain.records.topology.link import Link, LinkFigures
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology

NODES = frozenset({"gpu1", "gpu2", "gpu3"})


def earlier(runs: Path, number: int, step_s: float, nodes: list[str], **changes: object) -> Path:
    folder = submitted_run(runs, str(number), name=f"gpt-2026010{number}T000000Z-00ff")
    (folder / "run.yaml").write_text(json.dumps({**RUN, **changes}))
    rows = [{"generation": 0, "step_time_s": 9.0}] * 30
    rows += [{"generation": 1, "step_time_s": step_s * (1.5 if index % 5 == 0 else 1)} for index in range(30)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "attempts.jsonl").write_text(json.dumps({"attempt": 0, "nodes": nodes}) + "\n")
    os.utime(folder / "metrics.jsonl", (number, number))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return folder


def test_the_newest_run_of_the_same_work_counts(tmp_path: Path) -> None:
    earlier(tmp_path, 1, 1.0, ["gpu1", "gpu3"])
    same = earlier(tmp_path, 2, 2.0, ["gpu1", "gpu2"], steps=99, seed=5)
    earlier(tmp_path, 3, 3.0, ["gpu1", "gpu2"], batch={"global": 16})
    earlier(tmp_path, 4, 4.0, ["gpu1", "elsewhere"])
    earlier(tmp_path, 5, 5.0, ["gpu1"])
    found = measured_step(tmp_path, Run.from_json(RUN), NODES, 2, False)
    assert found is not None
    assert (found.run, found.median_s, found.range_s) == (same.name, 2.0, (2.0, 3.0))


def test_runs_on_a_part_of_each_node_and_on_whole_nodes_are_apart(tmp_path: Path) -> None:
    whole = earlier(tmp_path, 1, 1.0, ["gpu1", "gpu2"])
    part = earlier(tmp_path, 2, 2.0, ["gpu1", "gpu2"])
    provenance = Provenance(version="0", created="2026-01-01T00:00:00Z", transport="tcp", shared=True)
    device = Device(id="cpu0", type="cpu", flops={"fp32": 3e10}, memory_bytes=8e10, launch_s=6e-6)
    figures = LinkFigures(alpha_s=1e-5, beta_s_per_byte=1e-9)
    Topology(
        provenance=provenance,
        device_types={"cpu": DeviceType(kind="cpu", name="cpu")},
        nodes=[Node(id=name, addr="127.0.0.1", devices=[device]) for name in ("gpu1", "gpu2")],
        fabric=Fabric(links=[Link(a="gpu1", b="gpu2", ab=figures, ba=figures)]),
    ).write(part / "topology.json")
    (part / "topology.json").chmod(0o600)
    for shared, folder in ((False, whole), (True, part)):
        found = measured_step(tmp_path, Run.from_json(RUN), NODES, 2, shared)
        assert found is not None
        assert found.run == folder.name


@pytest.mark.parametrize("text", ["", "{", '{"generation": 0}\n', '{"step_time_s": "x"}\n' * 40, "[]\n\0\n"])
def test_what_cannot_be_read_is_passed_over(tmp_path: Path, text: str) -> None:
    (earlier(tmp_path, 1, 1.0, ["gpu1", "gpu2"]) / "metrics.jsonl").write_text(text)
    (earlier(tmp_path, 2, 1.0, ["gpu1", "gpu2"]) / "run.yaml").write_text("steps: [")
    (earlier(tmp_path, 3, 1.0, ["gpu1", "gpu2"]) / "metrics.jsonl").chmod(0o666)
    assert measured_step(tmp_path, Run.from_json(RUN), NODES, 2, False) is None
