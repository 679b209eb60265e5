"""`hpctrain submit`: what is left behind, and what is said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from run_folders import RUN, submitted_run

from hpctrain.base.errors import CommandError, Refused, StorageError
from hpctrain.cli.provisional import check_provisional, last_known
from hpctrain.launch import submission
from hpctrain.launch.folder import RunFolder
from hpctrain.launch.training import Prepared
from hpctrain.records.link import Link, LinkFigures
from hpctrain.records.run import Run, read_run
from hpctrain.records.topology import Device, DeviceType, Fabric, Node, Provenance, Topology


@pytest.fixture
def run_file(monkeypatch, tmp_path):
    """A run file whose data is not looked at."""
    monkeypatch.setattr("hpctrain.cli.submit.prepare", _prepared)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(RUN))
    return path


def _prepared(path, overrides, count, topology, plan, runner, queued=False):
    run = read_run(path, overrides)
    return Prepared(run, run.spec(), [], None, None)


@pytest.mark.parametrize("kind", ["slurm", "local"])
def test_a_refused_submission_leaves_no_run(fake, runs, hpctrain, run_file, monkeypatch, kind):
    def refuse(*args):
        raise CommandError("sbatch refused the job: Invalid account")

    monkeypatch.setattr("hpctrain.cli.submit.submit_job", refuse)
    monkeypatch.setattr("hpctrain.cli.submit.submit_local", refuse)
    result = hpctrain("submit", str(run_file), "--set", f"cluster.kind={kind}")
    assert "Invalid account" in str(result.exception)
    assert list(runs.iterdir()) == []


def test_a_job_whose_id_cannot_be_written_is_ended(tmp_path: Path, monkeypatch) -> None:
    ended = []

    class Job:
        job_id = "7"

        def cancel(self, check: bool) -> None:
            ended.append(self.job_id)

    class Executor:
        def __init__(self, *args: object) -> None:
            pass

        def submit(self, *args: object) -> Job:
            return Job()

    def full(folder: Path, job: str) -> None:
        raise StorageError("disk full")

    monkeypatch.setattr(submission, "ScriptExecutor", Executor)
    monkeypatch.setattr(submission, "record_job", full)
    with pytest.raises(StorageError):
        submission.submit_job(RunFolder(tmp_path), Run.from_json(RUN))
    assert ended == ["7"]


def topology(*names: str, memory_bytes: float = 8e10) -> Topology:
    device = Device(id="cpu0", type="cpu", flops={"fp32": 3e10}, memory_bytes=memory_bytes, launch_s=6e-6)
    figures = LinkFigures(alpha_s=1e-5, beta_s_per_byte=1e-9)
    return Topology(
        provenance=Provenance(version="0", created="2026-01-01T00:00:00Z", transport="tcp"),
        device_types={"cpu": DeviceType(kind="cpu", name="cpu")},
        nodes=[Node(id=name, addr="127.0.0.1", devices=[device]) for name in names],
        fabric=Fabric(links=[Link(a=names[0], b=names[1], ab=figures, ba=figures)]),
    )


def test_nodes_that_the_job_cannot_get_say_nothing_about_it(tmp_path: Path) -> None:
    run = Run.from_json(RUN)
    prepared = Prepared(run, run.spec().model_copy(update={"vocab": 256}), [], None, None)
    small = submitted_run(tmp_path, "1", name="small-20260101T000000Z-00ff")
    topology("tiny1", "tiny2", memory_bytes=1e3).write(small / "topology.json")
    gpus = frozenset({"gpu1", "gpu2", "gpu3"})
    assert "no run has measured 2 of the nodes" in check_provisional(prepared, tmp_path, gpus)[0]
    assert "not known which nodes" in check_provisional(prepared, tmp_path, None)[0]
    with pytest.raises(Refused):
        check_provisional(prepared, tmp_path, frozenset({"tiny1", "tiny2"}))


def test_the_newest_topology_of_enough_of_the_nodes_counts(tmp_path: Path) -> None:
    names = (("gpu1", "gpu2"), ("gpu1", "old"), ("gpu3", "other"))
    for number, pair in enumerate(names):
        folder = submitted_run(tmp_path, str(number), name=f"gpt-20260101T00000{number}Z-00ff")
        topology(*pair).write(folder / "topology.json")
        os.utime(folder / "topology.json", (number, number))
    nodes = frozenset({"gpu1", "gpu2", "gpu3"})
    found = {count: last_known(tmp_path, nodes, count) for count in (1, 2, 3)}
    assert [[node.id for node in item.nodes] if item else None for item in found.values()] == [
        ["gpu3"], ["gpu1", "gpu2"], None,
    ]  # fmt: skip


def test_a_dry_run_in_machine_form_is_one_object(fake, runs, hpctrain, run_file, monkeypatch):
    monkeypatch.setenv("SBATCH_ACCOUNT", "physics")
    result = hpctrain("submit", str(run_file), "--dry-run", "--json")
    told = json.loads(result.stdout)
    assert (told["name"], told["folder"], told["job_id"]) == ("gpt", None, None)
    assert "#SBATCH --account=physics" in told["script"]
    assert "cluster.account: physics, from SBATCH_ACCOUNT" in result.stderr
    local = hpctrain("submit", str(run_file), "--dry-run", "--json", "--set", "cluster.kind=local")
    assert json.loads(local.stdout)["nodes"] == 2
    assert not runs.exists()
