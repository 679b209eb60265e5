"""A sweep on the fake Slurm: submitted as one array or not at all, found by its name, counted, compared, stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from fake_slurm import FakeSlurm
from run_folders import RUN, submitted_run

from hpctrain.base.errors import CommandError, CommandTimeoutError, InputError, RefusedError, StorageError
from hpctrain.base.process import CommandResult
from hpctrain.cli.main import cli
from hpctrain.jobs.wall_time import BilledResources, WallTime
from hpctrain.launch.preflight.prepare import PreparedRun
from hpctrain.launch.preflight.queue_checks import JobForecast
from hpctrain.records.history.run_log import BytesSent, Event, MetricRow
from hpctrain.records.history.sweep import SWEEP_FILE, Sweep
from hpctrain.records.run.run import read_run
from hpctrain.runs.locate import job_id

GRID = ("--sweep", "optimizer.lr=1e-3,3e-4", "--sweep", "seed=0-1")


def _prepared(given, runner, queued=False):
    run = given.run()
    return PreparedRun(run, run.spec().model_copy(update={"vocab": 256}), [], None, None)


@pytest.fixture
def run_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A run file whose data is not looked at."""
    for module in ("queueing", "sweep"):
        monkeypatch.setattr(f"hpctrain.launch.{module}.prepare", _prepared)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(RUN))
    return path


@pytest.fixture
def submitted(fake: FakeSlurm, runs: Path, hpctrain: Callable[..., Result], run_file: Path) -> dict:
    """A sweep of four runs, two at once, which run."""
    one_node = ("--set", "cluster.nodes=1")
    result = hpctrain("submit", str(run_file), *GRID, "--array-limit", "2", *one_node, "--json")
    assert result.exit_code == 0, result.exception
    fake.advance(1)
    return json.loads(result.stdout)


def _folders(told: dict) -> list[Path]:
    return [Path(run["folder"]) for run in told["runs"]]


def test_each_run_of_a_sweep_is_a_task_of_one_array(submitted, fake, runs):
    assert [run["job_id"] for run in submitted["runs"]] == ["1_0", "1_1", "1_2", "1_3"]
    assert [run["settings"] for run in submitted["runs"]][1] == {"optimizer.lr": "1e-3", "seed": "1"}
    found = [read_run(folder / "run.yaml") for folder in _folders(submitted)]
    assert [(run.name, run.optimizer.lr, run.seed) for run in found] == [
        ("gpt-lr1e-3-seed0", 1e-3, 0), ("gpt-lr1e-3-seed1", 1e-3, 1),
        ("gpt-lr3e-4-seed0", 3e-4, 0), ("gpt-lr3e-4-seed1", 3e-4, 1),
    ]  # fmt: skip
    assert [job_id(folder) for folder in _folders(submitted)] == ["1_0", "1_1", "1_2", "1_3"]
    sweep = Path(submitted["folder"])
    assert (submitted["job_id"], job_id(sweep), sweep.parent) == ("1", "1", runs.resolve())
    record = Sweep.read(sweep / SWEEP_FILE, owned=True)
    assert (record.name, record.array_limit) == ("gpt", 2)
    assert [sweep.parent / run.folder for run in record.runs] == _folders(submitted)
    submissions = [argv for argv in fake.argvs if argv[0] == "sbatch" and "--parsable" in argv]
    assert [argv[-1] for argv in submissions] == [str(sweep / "job.sh")]


def test_a_task_finds_its_folder_its_logs_and_what_its_steps_run(submitted):
    """By its number alone: nothing else differs between tasks."""
    sweep = Path(submitted["folder"])
    text = (sweep / "job.sh").read_text()
    assert "#SBATCH --array=0-3%2\n" in text
    assert f"#SBATCH --output={sweep}/logs/%a/%A_%a.job.log\n" in text
    for task, folder in enumerate(_folders(submitted)):
        assert (sweep / "logs" / str(task)).resolve() == folder / "logs"
        assert f"--job-name=gpt-{folder.name.split('-2')[0].removeprefix('gpt-')}\n" in (folder / "job.sh").read_text()
        assert (folder / "submitit" / f"1_{task}_submitted.pkl").exists()
    listed = re.search(r"runs=\((.*?)\)\n", text, re.DOTALL)[1].split()
    assert listed == [str(folder) for folder in _folders(submitted)]


@pytest.mark.parametrize(
    ("words", "requeue"),
    [
        (("--array-limit", "2"), "same_job"),
        ((), "new_job"),
        (("--array-limit", "2", "--set", "recovery.requeue=new_job"), "new_job"),
        (("--array-limit", "2", "--set", "recovery.successors=1"), "new_job"),
    ],
)
def test_a_run_that_goes_on_counts_in_the_limit_of_its_array(fake, runs, hpctrain, run_file, words, requeue):
    """As another job it would not."""
    result = hpctrain("submit", str(run_file), "--sweep", "seed=0-1", *words, "--json")
    assert result.exit_code == 0, result.exception
    (run, _) = [read_run(folder / "run.yaml") for folder in _folders(json.loads(result.stdout))]
    assert run.recovery.requeue == requeue


def test_a_dry_run_shows_every_run_and_the_script_and_writes_nothing(fake, runs, hpctrain, run_file):
    result = hpctrain("submit", str(run_file), *GRID, "--dry-run")
    assert result.exit_code == 0, result.exception
    assert re.search(r"3 +gpt-lr3e-4-seed1 +3e-4 +1\b", result.stdout)
    assert "#SBATCH --array=0-3\n" in result.stdout
    told = json.loads(hpctrain("submit", str(run_file), *GRID, "--dry-run", "--json").stdout)
    assert told["runs"][0]["name"] == "gpt-lr1e-3-seed0"
    assert (told["folder"], told["job_id"]) == (None, None)
    assert "#SBATCH --array=0-3\n" in told["script"]
    assert not runs.exists()
    assert not fake.jobs


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (("--sweep", "optimizer.lr=1e-3,x"), InputError, "gpt-lrx (run 2 of 2: optimizer.lr=x): "),
        (("--sweep", "optimizer.lr=x,1e-3"), InputError, "--sweep: run 1 of 2 (optimizer.lr=x): "),
        (("--sweep", "optimizer.lr=x,1e-3"), InputError, "(given by --sweep)"),
        (("--sweep", "recovery.successors=0,1"), RefusedError, "needs another job than gpt-successors0 (--no-requeue"),
        (("--sweep", "seed=0-1", "--set", "cluster.kind=local"), InputError, "only for jobs that are queued"),
        (("--sweep", "seed=0-1", "--wait"), InputError, "only for jobs that are queued"),
        (("--sweep", "seed=0-1", "--local"), InputError, "only for jobs that are queued"),
        (("--array-limit", "2"), InputError, "--array-limit: only for the runs of a sweep"),
        (("--sweep", "seed=0-1", "--own-job"), InputError, "--own-job"),
        (("--sweep-file", "none.csv"), InputError, "none.csv: no such file"),
    ],
)
def test_a_sweep_with_one_wrong_run_is_not_submitted(fake, runs, hpctrain, run_file, words, error, said):
    result = hpctrain("submit", str(run_file), *words)
    assert isinstance(result.exception, error), result.exception
    assert said in str(result.exception)
    assert not runs.exists()
    assert not fake.jobs


def test_a_cluster_without_room_for_the_array_says_so_first(fake, runs, hpctrain, run_file, monkeypatch):
    monkeypatch.setattr("fake_slurm.MAX_ARRAY_SIZE", 3)
    result = hpctrain("submit", str(run_file), *GRID)
    assert isinstance(result.exception, RefusedError)
    assert "found 4 runs; this cluster allows 3 tasks in a job array (MaxArraySize)" in str(result.exception)


def test_an_array_that_sbatch_refuses_leaves_no_folder(fake, runs, hpctrain, run_file, monkeypatch):
    def refuse(*_):
        raise CommandError("sbatch: error: QOSMaxSubmitJobPerUserLimit")

    monkeypatch.setattr("hpctrain.slurm.commands.Slurm.submit", refuse)
    result = hpctrain("submit", str(run_file), *GRID)
    assert "QOSMaxSubmitJobPerUserLimit" in str(result.exception)
    assert list(runs.iterdir()) == []


@pytest.mark.parametrize("error", [StorageError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("cancels", [True, False])
def test_an_array_whose_ids_cannot_be_recorded_goes_before_its_folders(
    fake, runs, hpctrain, run_file, monkeypatch, error, cancels
):
    """Where it cannot be cancelled, the folders stay."""
    recorded = []

    def record(folder: Path, job: str) -> None:
        recorded.append(job)
        if len(recorded) == 2:
            raise error

    def refuse(self: FakeSlurm, argv: list[str]) -> CommandResult:
        return self._reply(argv, error="scancel: error: Access denied")

    monkeypatch.setattr("hpctrain.launch.submission.record_job", record)
    if not cancels:
        monkeypatch.setattr(FakeSlurm, "_scancel", refuse)
    result = hpctrain("submit", str(run_file), *GRID)
    assert recorded == ["1_0", "1_1"]
    if cancels:
        assert {job.state for job in fake.jobs.values()} == {"CANCELLED"}
        assert list(runs.iterdir()) == []
        assert result.exit_code != 0
    else:
        assert len(list(runs.iterdir())) == 5
        assert "is kept for it: `squeue --me` shows the job" in str(result.exception)


@pytest.mark.parametrize("arrived", [True, False])
def test_an_array_that_sbatch_answers_too_late_keeps_its_folders_or_goes_too(
    fake, runs, hpctrain, run_file, monkeypatch, arrived
):
    answer = FakeSlurm._sbatch

    def late(self: FakeSlurm, argv: list[str]) -> CommandResult:
        if "--parsable" not in argv:
            return answer(self, argv)
        if arrived:
            answer(self, argv)
        raise CommandTimeoutError("sbatch: no answer after 60 s")

    monkeypatch.setattr(FakeSlurm, "_sbatch", late)
    result = hpctrain("submit", str(run_file), *GRID)
    assert "sbatch: no answer after 60 s" in str(result.exception)
    assert {job.state for job in fake.jobs.values()} == ({"CANCELLED"} if arrived else set())
    assert len(list(runs.iterdir())) == (0 if arrived else 5)
    assert ("is kept for it" in str(result.exception)) != arrived


def test_a_sweep_is_one_line_of_the_list_and_its_status_shows_the_runs(submitted, fake, hpctrain):
    fake.finish("1_1")
    (line,) = hpctrain("list", "--here").stdout.splitlines()
    assert line.split() == ["sweep", "failed", "1,", "starting", "2,", "queued", "1", submitted["folder"]]
    rows = json.loads(hpctrain("list", "--here", "--json").stdout)
    assert {row["sweep"] for row in rows} == {submitted["folder"]}
    for name in ("gpt", Path(submitted["folder"]).name, submitted["folder"], "1"):
        told = json.loads(hpctrain("status", name, "--json").stdout)
        assert (told["name"], told["job_id"]) == ("gpt", "1")
        assert [run["job_id"] for run in told["runs"]] == ["1_0", "1_1", "1_2", "1_3"]
    assert [line.split()[0] for line in hpctrain("status", "gpt").stdout.splitlines() if "/runs/" in line] == [
        "starting", "failed", "starting", "queued",
    ]  # fmt: skip
    alone = json.loads(hpctrain("status", "1_3", "--json").stdout)
    assert (alone["name"], alone["state"]) == ("gpt-lr3e-4-seed1", "queued")
    assert "as many tasks of its array run as it allows" in alone["reason"]


def test_a_shell_offers_sweeps_where_a_command_takes_them(submitted, monkeypatch):
    def offered(command: str) -> list[str]:
        param = cli.get_command(None, command).params[0]
        return [item.value for item in param.type.shell_complete(None, param, "gpt")]

    sweep = Path(submitted["folder"]).name
    assert "gpt" in offered("cancel")
    assert sweep in offered("compare")
    assert sweep not in offered("logs")
    assert "gpt-lr1e-3-seed0" in offered("logs")


def test_commands_of_one_run_want_a_run(submitted, hpctrain):
    error = hpctrain("logs", "gpt").exception
    assert str(error) == "gpt: a sweep, and not a run; `hpctrain status gpt` shows its runs: name one of them"


def test_the_newest_of_a_run_and_a_sweep_of_one_name_counts(submitted, fake, runs, hpctrain):
    submitted_run(runs, None, name="gpt-20990101T000000Z-00ff")
    assert json.loads(hpctrain("status", "gpt", "--json").stdout)["folder"].endswith("gpt-20990101T000000Z-00ff")


def test_a_run_of_a_sweep_is_cancelled_alone(submitted, fake, hpctrain):
    assert hpctrain("cancel", "--now", "gpt-lr1e-3-seed0").stdout.startswith("job 1_0 cancelled; it was running")
    fake.advance(1)
    states = {job.name: job.state for job in fake.jobs.values()}
    assert states == {"1_0": "CANCELLED", "1_1": "RUNNING", "1_2": "RUNNING", "1_3": "PENDING"}


def test_a_cancelled_sweep_starts_no_run_in_place_of_those_that_end(submitted, fake, hpctrain):
    said = hpctrain("cancel", "--now", "gpt").stdout
    assert [re.search(r"job (1_\d) cancelled; it was (\w+)", line).groups() for line in said.splitlines()] == [
        ("1_0", "running"), ("1_1", "running"), ("1_2", "waiting"), ("1_3", "waiting"),
    ]  # fmt: skip
    assert {job.state for job in fake.jobs.values()} == {"CANCELLED"}
    assert all(job.start_s == job.end_s for job in fake.jobs.values() if job.name in ("1_2", "1_3"))
    assert all((folder / "cancelled").exists() for folder in _folders(submitted))


def test_runs_that_ended_are_submitted_again_each_as_a_job_of_its_own(submitted, fake, hpctrain, monkeypatch):
    fake.finish("1_1", code=1)
    hpctrain("cancel", "--now", "gpt-lr1e-3-seed0")

    def submit(folder, run, slurm, exclude=()):
        return fake.submit(str(folder.path / "job.sh"))

    monkeypatch.setattr("hpctrain.cli.commands.resubmit.submit_job", submit)
    result = hpctrain("resubmit", "gpt", "--json")
    assert result.exit_code == 0, result.exception
    assert [(run["name"], run["job_id"]) for run in json.loads(result.stdout)] == [
        (_folders(submitted)[0].name, "5"), (_folders(submitted)[1].name, "6"),
    ]  # fmt: skip
    assert result.stderr.count("left as it is") == 2


def test_a_run_that_is_refused_does_not_keep_the_others_from_being_submitted_again(
    submitted, fake, hpctrain, monkeypatch
):
    fake.finish("1_0", code=1)
    fake.finish("1_1", code=1)
    first, second, *_ = _folders(submitted)

    def submit(folder, run, *_):
        if folder.path == first:
            raise CommandError("sbatch refused the job: No money")
        return fake.submit(str(folder.path / "job.sh"))

    monkeypatch.setattr("hpctrain.cli.commands.resubmit.submit_job", submit)
    result = hpctrain("resubmit", "gpt", "--json")
    assert [run["name"] for run in json.loads(result.stdout)] == [second.name]
    assert str(result.exception) == f"{first.name}: sbatch refused the job: No money"


def test_the_runs_of_a_sweep_share_one_look_at_the_software(submitted, fake):
    """Only the number of runs grows, not what is asked."""
    assert sum(argv == ("sbatch", "--version") for argv in fake.argvs) == 2  # whether there is a Slurm, and which
    assert all((folder / "provenance.json").exists() for folder in _folders(submitted))


def test_a_limit_that_does_not_count_runs_that_continue_says_so(fake, runs, hpctrain, run_file):
    words = ("submit", str(run_file), "--sweep", "seed=0-1", "--array-limit", "1", "--dry-run")
    said = "--array-limit 1 does not count a run that continues as another job"
    assert said not in hpctrain(*words).stdout
    assert said in hpctrain(*words, "--set", "recovery.requeue=new_job").stdout


def test_every_run_of_a_sweep_is_forecast_and_the_price_of_all_is_told(fake, runs, hpctrain, run_file, monkeypatch):
    def forecast(prepared, *_):
        if prepared.run.steps > 100:
            raise RefusedError("the model does not fit")
        time = WallTime(36.0, prepared.run.steps, None)
        return JobForecast([f"{prepared.run.steps} steps"], time, BilledResources(2, 8))

    monkeypatch.setattr("hpctrain.launch.sweep.forecast_job", forecast)
    result = hpctrain("submit", str(run_file), "--sweep", "steps=50,100", "--sweep", "seed=0-1", "--dry-run")
    assert result.stdout.count("gpt-steps100-seed0: 100 steps\n") == 1
    assert "gpt-steps100-seed1: 100 steps" not in result.stdout
    assert "all 4 runs together: about 24 GPU-hours" in result.stdout
    error = hpctrain("submit", str(run_file), "--sweep", "steps=100,200").exception
    assert str(error) == "--sweep: gpt-steps200 (run 2 of 2: steps=200): the model does not fit"
    assert not runs.exists()


def test_a_key_that_the_sweep_gives_may_be_missing_in_the_run_file(fake, runs, hpctrain, run_file):
    run_file.write_text(json.dumps({key: value for key, value in RUN.items() if key != "steps"}))
    result = hpctrain("submit", str(run_file), "--sweep", "steps=10,20", "--dry-run", "--json")
    assert result.exit_code == 0, result.exception


def test_a_name_that_is_nearly_that_of_a_sweep_is_told(submitted, hpctrain):
    assert str(hpctrain("status", "gptt").exception).endswith("nearest: gpt")


def test_the_folder_of_a_sweep_goes_with_its_last_run(submitted, fake, runs, hpctrain, monkeypatch):
    hpctrain("cancel", "--now", "gpt")
    monkeypatch.setattr("hpctrain.runs.prune.RECENT_ACTIVITY_S", -1.0)
    monkeypatch.setattr("hpctrain.runs.prune.last_activity", lambda folder: 0.0)
    alone = hpctrain("prune", _folders(submitted)[0].name, "--older-than", "0h", "--yes")
    assert alone.exit_code == 0, alone.exception
    assert Path(submitted["folder"]).exists()
    assert "removed the folder of the sweep" in hpctrain("prune", "gpt", "--older-than", "0h", "--yes").stdout
    assert list(runs.iterdir()) == []


def test_a_sweep_without_ended_runs_is_not_submitted_again(submitted, hpctrain):
    assert "nothing to submit again" in str(hpctrain("resubmit", "gpt").exception)


def _row(step: int, loss: float, valid: float | None = None, **more: object) -> MetricRow:
    values = {
        "step": step, "generation": 0, "time_s": 1_795_000_000.0 + step, "step_time_s": 0.5, "loss": loss, "lr": 1e-4,
        "grad_norm": 1.0, "tokens": 2048, "samples": 16 * step, "tokens_per_s": 4096.0, "bytes_sent": BytesSent(),
        "stage_time_s": [0.2], "bubble_fraction": 0.0, "micro_batches": [4], "valid_loss": valid, **more,
    }  # fmt: skip
    return MetricRow(**values)


@pytest.fixture
def trained(submitted: dict) -> dict:
    """Three of the runs have losses and a validation loss."""
    for number, folder in enumerate(_folders(submitted)[:3]):
        rows = [_row(1, 5.0), _row(2, 4.0 - number, 4.5 - number), _row(3, 4.2 - number)]
        lines = [json.dumps(row.to_json()) for row in rows]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        attempt = {"attempt": 0, "job_id": f"1_{number}", "nodes": ["gpu1", "gpu2"], "start": 0.0, "end": 1800.0}
        (folder / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    return submitted


def test_a_comparison_has_what_differs_and_the_smallest_loss_first(trained, hpctrain):
    result = hpctrain("compare", "gpt", "--json")
    assert result.exit_code == 0, result.exception
    rows = json.loads(result.stdout)["runs"]
    assert [Path(row["folder"]) for row in rows] == [_folders(trained)[number] for number in (2, 1, 0, 3)]
    assert {tuple(row["settings"]) for row in rows} == {("seed", "optimizer.lr")}
    second = rows[1]
    assert (second["loss"], second["best_loss"]) == (pytest.approx(3.2), pytest.approx(3.0))
    assert (second["valid_loss"], second["best_valid_loss"]) == (pytest.approx(3.5), pytest.approx(3.5))
    assert (second["tokens_per_s"], second["mfu"], second["node_hours"]) == (4096.0, None, 1.0)
    assert (rows[3]["loss"], rows[3]["gpu_hours"]) == (None, None)
    table = hpctrain("compare", "gpt", "--sort", "name").stdout.partition("\n\n")[0].splitlines()
    assert table[0].split()[:5] == ["run", "seed", "optimizer.lr", "state", "step"]
    assert [line.split()[0] for line in table[1:]] == sorted(folder.name for folder in _folders(trained))


def test_single_runs_are_compared_too_each_once(trained, hpctrain):
    rows = json.loads(hpctrain("compare", "1_0", "gpt-lr1e-3-seed1", "1_0", "--json").stdout)["runs"]
    assert {row["name"] for row in rows} == {folder.name for folder in _folders(trained)[:2]}
    assert [row["settings"] for row in rows] == [{"seed": 1}, {"seed": 0}]


def test_the_report_of_a_sweep_has_all_curves_and_the_table(trained, hpctrain):
    result = hpctrain("report", "gpt")
    assert result.exit_code == 0, result.exception
    page = Path(result.stdout.strip())
    assert page == Path(trained["folder"]) / "report.html"
    text = page.read_text()
    for chart in ("loss", "valid"):
        data = json.loads(re.search(rf'id="chart-{chart}-data">(.*?)</script>', text)[1])
        first, _, third, _ = (folder.name for folder in _folders(trained))
        assert {curve["name"] for curve in data["curves"]} == {third, f"2 seeds (0, 1) as {first}"}
        assert ["low" in curve for curve in data["curves"]].count(True) == 1
    assert all(folder.name in text.partition("<table>")[2] for folder in _folders(trained))
    assert page.stat().st_mode & 0o077 == 0


def test_a_damaged_run_is_a_row_of_its_own_and_stops_nothing(trained, hpctrain):
    first, second, third, _ = _folders(trained)
    (first / "run.yaml").write_text("model: [")
    (second / "metrics.jsonl").write_text('{"step": "x"}\n')
    attempts = [{"start": "x", "nodes": ["gpu1"]}, {"start": 0.0, "end": 1800.0, "nodes": "gpu1"}]
    (third / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in attempts))
    result = hpctrain("compare", "gpt", "--json")
    assert result.exit_code == 0, result.exception
    rows = {row["folder"]: row for row in json.loads(result.stdout)["runs"]}
    for folder, file in ((first, "run.yaml"), (second, "metrics.jsonl")):
        row = rows[str(folder)]
        assert (row["state"], row["loss"], row["node_hours"]) == ("unknown", None, None)
        assert file in row["reason"]
        assert f"{folder.name}: " in result.stderr
    assert set(rows[str(first)]["settings"].values()) == {None}
    assert None not in rows[str(second)]["settings"].values()
    assert (rows[str(third)]["loss"], rows[str(third)]["node_hours"]) == (pytest.approx(2.2), 0.0)
    table = hpctrain("compare", "gpt", "--sort", "node_hours").stdout
    assert all(folder.name in table for folder in _folders(trained))
    page = Path(hpctrain("report", "gpt").stdout.strip()).read_text()
    data = json.loads(re.search(r'id="chart-loss-data">(.*?)</script>', page)[1])
    assert [curve["name"] for curve in data["curves"]] == [third.name]
    assert all(folder.name in page.partition("<table>")[2] for folder in _folders(trained))


def test_an_attempt_without_an_end_counts_up_to_its_last_sign_of_life(trained, hpctrain):
    """Two attempts whose ends nobody wrote: of the first only its one step is known, the second failed."""
    folder, start = _folders(trained)[0], 1_795_000_000.0
    (folder / "run.yaml").write_text(json.dumps({**RUN, "cluster": {"kind": "local"}}))
    rows = [_row(1, 5.0), _row(2, 4.0, time_s=start + 10_000)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row.to_json())}\n" for row in rows))
    failed = Event(kind="failed", generation=-1, time_s=start + 10_900, reason="x", attempt=1, node="a")
    (folder / "events.jsonl").write_text(json.dumps(failed.to_json()) + "\n")
    attempts = [
        {"attempt": 0, "nodes": ["a"], "start": start - 899},
        {"attempt": 1, "nodes": ["a"], "start": start + 9100},
    ]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in attempts))
    (row,) = json.loads(hpctrain("compare", folder.name, "--json").stdout)["runs"]
    assert (row["state"], row["node_hours"]) == ("failed", pytest.approx((900 + 1800) / 3600))


def test_a_run_waits_for_all_runs_of_a_sweep(submitted, fake, hpctrain, run_file):
    words = ("--set", "name=later", "--set", "cluster.after=[gpt]", "--dry-run", "--json")
    script = json.loads(hpctrain("submit", str(run_file), *words).stdout)["script"]
    assert "#SBATCH --dependency=afterok:1_0:1_1:1_2:1_3\n" in script


@pytest.mark.parametrize(("settings", "hours"), [({"devices_per_node": 4}, 4.0), ({"device": "cpu"}, None)])
def test_gpu_hours_count_the_gpus_of_the_nodes(trained, hpctrain, settings, hours):
    folder = _folders(trained)[0]
    run = {**RUN, "cluster": {**RUN["cluster"], **settings}}
    (folder / "run.yaml").write_text(json.dumps(run))
    (row,) = json.loads(hpctrain("compare", folder.name, "--json").stdout)["runs"]
    assert (row["node_hours"], row["gpu_hours"]) == (1.0, hours)


def test_a_sweep_lists_only_the_runs_that_are_left(submitted, fake, hpctrain):
    for folder in _folders(submitted)[1:]:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.unlink() if not path.is_dir() else path.rmdir()
        folder.rmdir()
    assert len(json.loads(hpctrain("status", "gpt", "--json").stdout)["runs"]) == 1


def test_a_sweep_of_somebody_else_is_not_read(submitted, hpctrain):
    (Path(submitted["folder"]) / SWEEP_FILE).chmod(0o666)
    assert "can be written by others" in str(hpctrain("status", submitted["folder"]).exception)
    assert len([line for line in hpctrain("list", "--here").stdout.splitlines() if "/runs/" in line]) == 4
