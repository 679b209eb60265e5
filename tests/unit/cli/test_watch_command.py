"""`watch`, and `logs -f`: a run over time, on a fake Slurm whose clock the command's own sleeping moves."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_clock import FakeClock
from run_folders import event, submitted_run

from hpctrain.base.output_streams import format_timestamp
from hpctrain.records.history.run_log import BytesSent, Event, MetricRow
from hpctrain.records.history.sweep import Sweep, SweptRun


@pytest.fixture
def clock(fake, monkeypatch) -> Callable[[Iterator[None]], list[float]]:
    """Give the commands a clock on which what happens happens: one step of the story for each second slept."""

    def told_by(story: Iterator[None]) -> list[float]:
        asked: list[float] = []

        def slept(seconds: float) -> None:
            fake.advance(round(seconds))
            next(story, None)
            asked.extend([made.now()] * (sum(argv[0] == "squeue" for argv in fake.argvs) - len(asked)))

        made = FakeClock(wall=fake.now, on_sleep=slept)
        for name in ("cli.commands.follow", "jobs.run_status"):
            monkeypatch.setattr(f"hpctrain.{name}.SystemClock", lambda: made)
        return asked

    return told_by


def append(folder: Path, *items) -> None:
    for item in items:
        name = "metrics.jsonl" if isinstance(item, MetricRow) else "events.jsonl"
        with (folder / name).open("a") as file:
            file.write(json.dumps(item.to_json()) + "\n")


def at(time_s: float, item: Event) -> Event:
    return item.model_copy(update={"time_s": time_s})


def row(step: int, time_s: float) -> MetricRow:
    return MetricRow(
        step=step, generation=0, time_s=time_s, step_time_s=1.0, loss=3.0, lr=0.1, tokens=100, samples=8 * step,
        tokens_per_s=100.0, bytes_sent=BytesSent(), stage_time_s=[0.5], micro_batches=[1],
    )  # fmt: skip


def wait(rounds: int) -> Iterator[None]:
    for _ in range(rounds):
        yield


def test_a_run_is_watched_from_the_queue_through_a_requeue_to_its_end(fake, runs, hpctrain, clock):
    first = fake.submit("--nodes=3")
    job = fake.submit("--nodes=2")
    folder = submitted_run(runs, job)
    begin = event("attempt_started", -1, "attempt 0 on 2 nodes", nodes=["gpu1", "gpu2"])
    start = event("generation_started", 0, members=["gpu1", "gpu2"], pp=1, dp=2, tp=1)

    def story() -> Iterator[None]:
        yield from wait(60)
        fake.finish(first)
        yield from wait(40)
        append(folder, begin, start, row(1, fake.now))
        yield from wait(40)
        fake.preempt(job)
        append(folder, at(fake.now, event("preempted", 0, "saved for step 1")))
        yield from wait(60)
        append(folder, at(fake.now, begin), at(fake.now, start), row(10, fake.now))
        append(folder, at(fake.now, event("finished", 0, step=10, loss=3.0)))

    asked = clock(story())
    result = hpctrain("watch", job)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    told = [line.partition(":")[0] for line in lines if line.partition(":")[0].isalpha()]
    assert told == ["queued", "starting", "running", "requeued", "starting", "done"]
    assert any("enough free nodes are missing" in line and "(Resources)" in line for line in lines)
    assert any("step  1/10" in line for line in lines)
    assert any(line.endswith("  saved for step 1") for line in lines)
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert min(gaps) >= 10
    assert max(gaps) >= 30


def test_a_failure_ends_the_watching_when_the_job_is_over(fake, runs, hpctrain, clock):
    job = fake.submit("--nodes=2")
    folder = submitted_run(runs, job)

    def story() -> Iterator[None]:
        append(folder, event("failed", 0, "no node left"))
        yield from wait(20)
        fake.finish(job, code=1)

    clock(story())
    result = hpctrain("watch", "gpt")
    assert result.exit_code == 1
    assert "no node left; its job 1 is running still" in result.stdout
    assert "failed: no node left\n" in result.stdout


def test_a_controller_that_is_away_is_no_end(fake, runs, hpctrain, clock):
    job = fake.submit("--nodes=2")
    folder = submitted_run(runs, job, event("failed", 0, "cut off"))
    fake.away = True

    def story() -> Iterator[None]:
        yield from wait(100)
        fake.away = False
        fake.finish(job)
        append(folder, event("finished", 0, step=10))

    clock(story())
    result = hpctrain("watch", "gpt")
    assert result.exit_code == 0
    assert "the Slurm controller does not answer" in result.stdout


def test_a_job_that_only_accounting_remembers(fake, runs, hpctrain, clock):
    submitted_run(runs, "77", event("generation_started", members=["gpu1"]))
    clock(iter(()))
    fake.accounting = "77|OUT_OF_MEMORY|0:125|gpu1|1|2|3|10|low|None\n".replace("|", "\x1f")
    result = hpctrain("watch", "gpt")
    assert result.exit_code == 1
    assert "failed: job 77 ended: OUT_OF_MEMORY, exit code 0" in result.stdout
    assert sum(argv[0] == "sacct" for argv in fake.argvs) == 1


def test_ctrl_c_leaves_the_run_alone(fake, runs, hpctrain, clock):
    job = fake.submit("--nodes=2")
    submitted_run(runs, job)

    def story() -> Iterator[None]:
        yield from wait(3)
        raise KeyboardInterrupt

    clock(story())
    result = hpctrain("watch", "gpt")
    assert result.exit_code == 130
    assert "no longer watched; the run goes on" in result.stderr
    assert fake.jobs[int(job)].state == "RUNNING"
    assert fake.signals == []


def test_a_sweep_is_watched_until_all_its_runs_are_over(fake, runs, hpctrain, clock):
    jobs = [fake.submit("--nodes=1") for _ in range(2)]
    start = event("generation_started", 0, members=["gpu1"], pp=1, dp=1, tp=1)
    folders = [submitted_run(runs, job, start, name=f"gpt-{job}-20260101T000000Z-00ff") for job in jobs]
    sweep = runs / "sizes-20260101T000000Z-00aa"
    sweep.mkdir()
    tasks = [SweptRun(name=folder.name, folder=folder.name, settings={}) for folder in folders]
    Sweep(name="sizes", runs=tasks).write(sweep / "sweep.json")

    def story() -> Iterator[None]:
        yield from wait(3)
        append(folders[0], row(1, fake.now), row(10, fake.now), event("finished", 0, step=10))
        yield from wait(20)
        append(folders[1], event("failed", 0, "no node left"))
        fake.finish(jobs[1], code=1)

    asked = clock(story())
    result = hpctrain("watch", "sizes", "--json")
    assert result.exit_code == 1, result.output
    values = [json.loads(line) for line in result.stdout.splitlines()]
    states = [(value["run"], value["status"]["state"]) for value in values if "status" in value]
    ends = [(folder.name, state) for folder, state in zip(folders, ("done", "failed"), strict=True)]
    assert [pair for pair in states if pair[1] in ("done", "failed")] == ends
    assert [value["metrics"]["step"] for value in values if "metrics" in value] == [1, 10]
    assert min(later - earlier for earlier, later in itertools.pairwise(asked)) >= 10


def test_logs_are_followed_into_the_next_attempt(fake, runs, hpctrain, clock):
    job = fake.submit("--nodes=2")
    folder = submitted_run(runs, job)
    begin = 1_795_000_000.0

    def log(name: str, at: float, text: str) -> None:
        path = folder / "logs" / name
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(f"{format_timestamp(begin + at)}{text}\n")

    log("0/n1.0.log", 1, "first words")

    def story() -> Iterator[None]:
        yield from wait(5)
        log("0/n1.0.log", 2, "asked to stop")
        fake.preempt(job)
        yield from wait(30)
        log("1/n2.0.log", 40, "here again")
        append(folder, event("finished", 0, step=10))

    clock(story())
    result = hpctrain("logs", "gpt", "-f")
    assert [line.partition(" ")[2].partition(" ")[2] for line in result.stdout.splitlines()] == [
        "0/n1.0 | first words",
        "0/n1.0 | asked to stop",
        "1/n2.0 | here again",
    ]
    assert "gpt: done" in result.stderr
