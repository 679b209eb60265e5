"""`hpctrain submit`: what is left behind, and what is said."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from run_folders import RUN, submitted_run

from hpctrain.base.errors import CommandError, RefusedError, StorageError
from hpctrain.launch import queueing, submission
from hpctrain.launch.preflight.prepare import PreparedRun
from hpctrain.launch.preflight.queue_checks import check_provisional, last_known
from hpctrain.records.history.ledger import read_bad_nodes
from hpctrain.records.history.past_runs import read_past_runs
from hpctrain.records.run.run import Run, read_run
from hpctrain.records.topology.link import Link, LinkFigures
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology, Verdict
from hpctrain.runs.locate import record_job


@pytest.fixture
def run_file(monkeypatch, tmp_path):
    """A run file whose data is not looked at."""
    monkeypatch.setattr("hpctrain.launch.queueing.prepare", _prepared)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(RUN))
    return path


def _prepared(given, runner, queued=False):
    run = given.run()
    return PreparedRun(run, run.spec().model_copy(update={"vocab": 256}), [], None, None)


@pytest.mark.parametrize("kind", ["slurm", "local"])
def test_a_refused_submission_leaves_no_run(fake, runs, hpctrain, run_file, monkeypatch, kind):
    def refuse(*args):
        raise CommandError("sbatch refused the job: Invalid account")

    monkeypatch.setattr("hpctrain.launch.queueing.submit_job", refuse)
    monkeypatch.setattr("hpctrain.launch.queueing.submit_local", refuse)
    fake.installed = kind == "slurm"
    result = hpctrain("submit", str(run_file), "--set", f"cluster.kind={kind}")
    assert "Invalid account" in str(result.exception)
    assert list(runs.iterdir()) == []


def test_what_submit_writes_is_for_its_owner_alone_whatever_the_umask_is(fake, runs, hpctrain, run_file, monkeypatch):
    """A person may open the run folder to readers later."""

    def submit(folder, run, slurm, exclude=()):
        job = fake.submit("--nodes=2")
        record_job(folder.path, job)
        (folder.path / "submitit").mkdir()
        (folder.path / "submitit" / f"{job}_submitted.pkl").write_text("")
        return job

    monkeypatch.setattr("hpctrain.launch.queueing.submit_job", submit)
    before = os.umask(0o002)
    try:
        result = hpctrain("submit", str(run_file), "--set", "recovery.successors=1")
        assert os.umask(0o002) == 0o002
    finally:
        os.umask(before)
    assert result.exit_code == 0, result.exception
    (folder,) = runs.iterdir()
    names = {path.relative_to(folder).as_posix(): path.stat().st_mode & 0o077 for path in folder.rglob("*")}
    assert {"run.yaml", "successors.jsonl", "logs", "submitit/2_submitted.pkl"} <= set(names)
    assert {name: mode for name, mode in names.items() if mode} == {}


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_local_run_is_not_submitted_on_a_machine_with_slurm(fake, runs, hpctrain, run_file, words):
    result = hpctrain("submit", str(run_file), "--set", "cluster.kind=local", *words)
    assert result.exception.exit_code == 2
    said = str(result.exception)
    assert "cluster.kind: found local on a machine with Slurm" in said
    assert "--set cluster.kind=slurm" in said
    assert f"add --local (in the background), or `hpctrain train {run_file} --local 2`" in said
    assert not runs.exists()


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_local_starts_it_here_all_the_same_and_warns_of_a_login_node(fake, runs, hpctrain, run_file, monkeypatch, kind):
    monkeypatch.setattr("hpctrain.launch.queueing.submit_local", lambda folder, count, runner: f"4711 on {count}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(psutil, "process_iter", lambda names: [])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    result = hpctrain("submit", str(run_file), "--set", f"cluster.kind={kind}", "--local", "--json")
    assert result.exit_code == 0, result.exception
    assert "looks like a login node, and the run keeps 64 of its cores busy" in result.stderr
    (folder,) = runs.iterdir()
    assert json.loads(result.stdout) == {"name": folder.name, "folder": str(folder), "job_id": "4711 on 2"}
    assert read_run(folder / "run.yaml").cluster.kind == "local"
    assert not any(argv[0] == "sbatch" and "--version" not in argv for argv in fake.argvs)


def test_a_run_that_was_submitted_is_in_the_history(fake, runs, hpctrain, run_file, monkeypatch):
    monkeypatch.setattr("hpctrain.launch.queueing.submit_job", lambda folder, run, *_: fake.submit("--nodes=2"))
    monkeypatch.setattr("hpctrain.launch.queueing.submit_local", lambda folder, count, runner: "4711")
    for kind in ("slurm", "local"):
        fake.installed = kind == "slurm"
        result = hpctrain("submit", str(run_file), "--set", f"cluster.kind={kind}")
        assert result.exit_code == 0, result.exception
    found = read_past_runs(os.environ)
    assert {past.folder for past in found} == {str(path) for path in runs.iterdir()}
    assert [(past.verb, past.name, past.job_id, past.cluster) for past in found] == [
        ("submit", "gpt", "1", "fake"),
        ("submit", "gpt", "4711", None),
    ]


def test_submit_says_how_to_follow_the_run_and_how_to_stop_it(fake, runs, hpctrain, run_file, monkeypatch):
    monkeypatch.setattr("hpctrain.launch.queueing.submit_local", lambda *args: "4711")
    fake.installed = False
    said = hpctrain("submit", str(run_file), "--set", "cluster.kind=local").stdout
    (folder,) = runs.iterdir()
    for words in ("watch", "logs -f", "status", "cancel"):
        assert f"hpctrain {words} {folder.name}\n" in said


LATE = CommandError("sbatch refused the job: sbatch: error: Batch job submission failed: Socket timed out on send/recv")


@pytest.mark.parametrize("error", [StorageError("disk full"), KeyboardInterrupt(), LATE])
@pytest.mark.parametrize("arrived", [True, False])
def test_the_folder_of_a_job_that_slurm_may_have_goes_only_with_the_job(
    fake, runs, hpctrain, run_file, monkeypatch, error, arrived
):
    class Executor:
        def __init__(self, folder: Path, *_: object) -> None:
            self.script = folder.parent / "job.sh"

        def submit(self, *_: object) -> None:
            if arrived:
                fake.submit(str(self.script))
            raise error

    other = fake.submit()
    monkeypatch.setattr(submission, "ScriptExecutor", Executor)
    result = hpctrain("submit", str(run_file))
    states = [job.state for job in fake.jobs.values()]
    if arrived:
        assert states == ["RUNNING", "CANCELLED"]
        assert list(runs.iterdir()) == []
    else:
        (folder,) = runs.iterdir()
        assert f"{folder.resolve()} is kept for it: `squeue --me` shows the job" in str(result.exception)
    assert fake.jobs[int(other)].state == "RUNNING"


def test_a_job_whose_id_cannot_be_recorded_is_cancelled(fake, runs, hpctrain, run_file, monkeypatch):
    class Executor:
        def __init__(self, folder: Path, *_: object) -> None:
            self.script = folder.parent / "job.sh"

        def submit(self, *_: object) -> SimpleNamespace:
            return SimpleNamespace(job_id=fake.submit(str(self.script)))

    def full(folder: Path, job: str) -> None:
        raise StorageError("disk full")

    monkeypatch.setattr(submission, "ScriptExecutor", Executor)
    monkeypatch.setattr(submission, "record_job", full)
    result = hpctrain("submit", str(run_file))
    assert str(result.exception) == "disk full"
    assert [job.state for job in fake.jobs.values()] == ["CANCELLED"]
    assert list(runs.iterdir()) == []


def topology(*names: str, memory_bytes: float = 8e10, shared: bool = False) -> Topology:
    device = Device(id="cpu0", type="cpu", flops={"fp32": 3e10}, memory_bytes=memory_bytes, launch_s=6e-6)
    figures = LinkFigures(alpha_s=1e-5, beta_s_per_byte=1e-9)
    return Topology(
        provenance=Provenance(version="0", created="2026-01-01T00:00:00Z", transport="tcp", shared=shared),
        device_types={"cpu": DeviceType(kind="cpu", name="cpu")},
        nodes=[Node(id=name, addr="127.0.0.1", devices=[device]) for name in names],
        fabric=Fabric(links=[Link(a=names[0], b=names[1], ab=figures, ba=figures)]),
    )


def test_nodes_that_the_job_cannot_get_say_nothing_about_it(tmp_path: Path) -> None:
    run = Run.from_json(RUN)
    prepared = PreparedRun(run, run.spec().model_copy(update={"vocab": 256}), [], None, None)
    small = submitted_run(tmp_path, "1", name="small-20260101T000000Z-00ff")
    topology("tiny1", "tiny2", memory_bytes=1e3).write(small / "topology.json")
    gpus = frozenset({"gpu1", "gpu2", "gpu3"})
    assert "no run has measured 2 of the nodes" in check_provisional(prepared, tmp_path, gpus, False)[0]
    assert "not known which nodes" in check_provisional(prepared, tmp_path, None, False)[0]
    with pytest.raises(RefusedError):
        check_provisional(prepared, tmp_path, frozenset({"tiny1", "tiny2"}), False)


@pytest.mark.parametrize("part", [False, True])
def test_figures_of_a_part_say_nothing_about_whole_nodes_nor_the_other_way_round(tmp_path: Path, part: bool) -> None:
    run = Run.from_json(RUN)
    nodes, other = frozenset({"gpu1", "gpu2"}), topology("gpu1", "gpu2", memory_bytes=1e3, shared=not part)
    folder = submitted_run(tmp_path, "1", name="small-20260101T000000Z-00ff")
    other.write(folder / "topology.json")
    prepared = PreparedRun(run, run.spec().model_copy(update={"vocab": 256}), [], None, None)
    assert "no run has measured 2 of the nodes" in check_provisional(prepared, tmp_path, nodes, part)[0]
    with pytest.raises(RefusedError):
        check_provisional(prepared, tmp_path, nodes, not part)
    words, *lines = check_provisional(replace(prepared, topology=other), tmp_path, nodes, part)
    assert words.startswith("--topology: the topology was measured with ")
    assert "it is not used, and the nodes are measured again" in words
    assert "no run has measured 2 of the nodes" in lines[0]


def test_the_newest_topology_of_enough_of_the_nodes_counts(tmp_path: Path) -> None:
    names = (("gpu1", "gpu2"), ("gpu1", "old"), ("gpu3", "other"))
    for number, pair in enumerate(names):
        folder = submitted_run(tmp_path, str(number), name=f"gpt-20260101T00000{number}Z-00ff")
        topology(*pair).write(folder / "topology.json")
        os.utime(folder / "topology.json", (number, number))
    nodes = frozenset({"gpu1", "gpu2", "gpu3"})
    found = {count: last_known(tmp_path, nodes, count, False) for count in (1, 2, 3)}
    assert [[node.id for node in item[0].nodes] if item else None for item in found.values()] == [
        ["gpu3"], ["gpu1", "gpu2"], None,
    ]  # fmt: skip


def test_a_dry_run_in_machine_form_is_one_object(fake, runs, hpctrain, run_file, monkeypatch):
    monkeypatch.setenv("SBATCH_ACCOUNT", "physics")
    result = hpctrain("submit", str(run_file), "--dry-run", "--json")
    told = json.loads(result.stdout)
    assert (told["name"], told["folder"], told["job_id"]) == ("gpt", None, None)
    assert "#SBATCH --account=physics" in told["script"]
    assert "cluster.account: physics, from SBATCH_ACCOUNT" in result.stderr
    fake.installed = False
    local = hpctrain("submit", str(run_file), "--dry-run", "--json", "--set", "cluster.kind=local")
    assert json.loads(local.stdout)["nodes"] == 2
    assert not runs.exists()


@pytest.fixture
def queued(fake, monkeypatch):
    """Jobs are queued in the fake Slurm, by the script that would be submitted."""

    def submit(folder, run, slurm, exclude=()):
        script = folder.path / "job.sh"
        script.write_text(submission.preview(run, folder.path))
        job = fake.submit(str(script))
        record_job(folder.path, job)
        return job

    monkeypatch.setattr("hpctrain.launch.queueing.submit_job", submit)
    return fake


def asked(fake, words):
    return [argv for argv in fake.argvs if words in argv]


def test_the_partition_is_chosen_and_slurm_is_asked_about_the_very_script(queued, runs, hpctrain, run_file):
    result = hpctrain("submit", str(run_file), "--json")
    told = json.loads(result.stdout)
    assert read_run(Path(told["folder"]) / "run.yaml").cluster.partition == "high"
    assert queued.jobs[int(told["job_id"])].partition == "high"
    assert "partition high chosen: with GPUs, enough nodes are free now, jobs are not preempted" in result.stderr
    assert "next best: low: with GPUs, enough nodes are free now, jobs may be preempted" in result.stderr
    assert "Slurm expects to start it" in result.stderr
    assert len(asked(queued, "--test-only")) == 1
    for what in ("node", "partition", "config"):
        assert len(asked(queued, what)) == 1


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_what_sbatch_refuses_leaves_no_run(queued, runs, hpctrain, run_file, words, monkeypatch):
    monkeypatch.setattr(
        type(queued), "_sbatch", lambda self, argv: self._reply(argv, error="sbatch: error: No money\n")
    )
    result = hpctrain("submit", str(run_file), *words)
    assert isinstance(result.exception, RefusedError)
    assert str(result.exception) == "sbatch --test-only refuses the job: No money"
    assert not runs.exists() or list(runs.iterdir()) == []


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_where_sbatch_refuses_the_best_partition_the_next_best_is_taken(
    queued, runs, hpctrain, run_file, words, monkeypatch
):
    taken = type(queued)._sbatch

    def sbatch(self, argv):
        is_high = "--partition=high" in Path(argv[-1]).read_text()
        return self._reply(argv, error="sbatch: error: No money\n") if is_high else taken(self, argv)

    monkeypatch.setattr(type(queued), "_sbatch", sbatch)
    result = hpctrain("submit", str(run_file), *words)
    assert result.exit_code == 0, result.exception
    assert "partition low chosen: of high, sbatch --test-only refuses the job: No money" in result.output
    assert [job.partition for job in queued.jobs.values()] == ([] if words else ["low"])
    error = hpctrain("submit", str(run_file), "--set", "cluster.partition=high").exception
    assert str(error) == "sbatch --test-only refuses the job: No money", "a partition that was asked for stays"


def test_no_partition_that_fits_is_refused_with_every_reason(queued, runs, hpctrain, run_file):
    error = hpctrain("submit", str(run_file), "--set", "cluster.nodes=9").exception
    assert isinstance(error, RefusedError)
    assert [line.partition(":")[0] for line in str(error).splitlines()] == ["cluster.partition"] + ["cluster.nodes"] * 2


@pytest.mark.parametrize(("nodes", "left_out"), [("2", ["gpu2"]), ("3", [])])
def test_the_nodes_that_the_topology_given_excludes_are_not_asked_for(
    fake, runs, hpctrain, run_file, monkeypatch, nodes, left_out
):
    """Unless the run needs them: then the plan does without."""
    asked_for = []

    def submit(folder, run, slurm, exclude=()):
        asked_for.append(list(exclude))
        return fake.submit("--nodes=2")

    def with_topology(given, runner, queued):
        prepared, verdict = _prepared(given, runner), Verdict(status="warn", exclude=["gpu2"])
        return replace(prepared, topology=topology("gpu1", "gpu2", "gpu3").model_copy(update={"verdict": verdict}))

    monkeypatch.setattr("hpctrain.launch.queueing.prepare", with_topology)
    monkeypatch.setattr("hpctrain.launch.queueing.check_provisional", lambda *_: [])
    monkeypatch.setattr("hpctrain.launch.queueing.submit_job", submit)
    fraction = ("--set", "recovery.exclude_max_fraction=0.5")
    result = hpctrain("submit", str(run_file), "--set", f"cluster.nodes={nodes}", *fraction)
    assert result.exit_code == 0, result.exception
    assert asked_for == [left_out]
    assert f"the topology excludes gpu2: the {'job does without' if left_out else 'job may get it'}" in result.stdout
    (folder,) = runs.iterdir()
    assert [line.node for line in read_bad_nodes(folder)] == ["gpu2"]


def test_a_run_waits_for_a_run_and_follows_it_to_its_next_job(queued, runs, hpctrain, run_file, monkeypatch):
    first = json.loads(hpctrain("submit", str(run_file), "--json").stdout)
    second = json.loads(
        hpctrain("submit", str(run_file), "--json", "--set", "name=later", "--set", "cluster.after=gpt").stdout
    )
    assert read_run(Path(second["folder"]) / "run.yaml").cluster.after == [first["folder"]]
    assert queued.jobs[2].dependency == "afterok:1"
    queued.finish("1", code=1)
    monkeypatch.setattr("hpctrain.cli.commands.resubmit.submit_job", queueing.submit_job)
    monkeypatch.setattr("hpctrain.cli.commands.resubmit._check_ended", lambda *_: None)
    again = hpctrain("resubmit", "gpt", "--json")
    assert json.loads(again.stdout)["job_id"] == "3"
    assert "(job 2) waits for job 3" in again.stderr
    assert queued.jobs[2].dependency == "afterok:3"


def test_what_the_sites_profile_gives_is_in_the_runs_own_file(queued, runs, hpctrain, run_file):
    site = runs.parent / "config" / "hpctrain" / "site.yaml"
    site.parent.mkdir(parents=True)
    site.write_text("profiles: {fake: {match: fake, cluster: {account: physics, partition: low}}}")
    result = hpctrain("submit", str(run_file), "--json", "--set", "cluster.qos=long")
    cluster = read_run(Path(json.loads(result.stdout)["folder"]) / "run.yaml").cluster
    assert (cluster.account, cluster.partition, cluster.qos) == ("physics", "low", "long")
    assert f"from profile 'fake' of {site}: cluster.partition, cluster.account" in result.stderr
    assert "no such profile" in str(hpctrain("submit", str(run_file), "--site", "nosuch").exception)


def test_gpus_of_a_type_are_asked_for_or_refused(queued, runs, hpctrain, run_file):
    told = hpctrain("submit", str(run_file), "--dry-run", "--json", "--set", "cluster.gpu_type=a100")
    assert "#SBATCH --gpus-per-node=a100:4\n" in json.loads(told.stdout)["script"]
    assert "4 GPUs a node are asked for (of type a100)" in told.stderr
    refused = hpctrain("submit", str(run_file), "--set", "cluster.gpu_type=h100").exception
    assert isinstance(refused, RefusedError)
    assert "cluster.gpu_type: found 'h100'; allowed in partition 'low': a100" in str(refused)
    own_way = hpctrain("submit", str(run_file), "--dry-run", "--set", "cluster.sbatch=['--gres=gpu:a100:2']")
    assert "--gpus-per-node=" not in own_way.stdout.partition("\n\n")[0]


def test_an_allocation_that_is_there_waits_for_nobody(fake, runs, hpctrain, run_file, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    result = hpctrain("submit", str(run_file), "--dry-run", "--json", "--set", "cluster.after=nosuch")
    assert "cluster.after: not waited for" in result.stderr
    assert "--dependency" not in json.loads(result.stdout)["script"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ("model.preset=large-1.3b", "precision=bf16", "cluster.time=10:00"),
            [
                "from data sheets, as nothing was measured on these nodes: 8 × a100 at 25 % of their peak",
                "for 10 steps: 0.00",
                "GPU-hours (start-up not counted",
                "cluster.time 00:10:00",
            ],
        ),
        (
            ("model.preset=large-1.3b", "precision=bf16", "cluster.devices_per_node=1"),
            ["from data sheets, as nothing was measured on these nodes: 2 × a100"],
        ),
        (("model.preset=tiny-1m",), ["is unknown until it is measured: in precision fp32"]),
        (("precision=bf16",), ["is unknown until it is measured: no published run has so small a model"]),
    ],
)
def test_what_a_first_run_costs_is_estimated_from_data_sheets(fake, runs, hpctrain, run_file, settings, words):
    more = [word for setting in settings for word in ("--set", setting)]
    result = hpctrain("submit", str(run_file), "--dry-run", "--json", *more)
    assert result.exit_code == 0, result.exception
    for expected in words:
        assert expected in result.stderr, result.stderr
