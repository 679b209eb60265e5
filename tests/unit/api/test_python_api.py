"""`hpctrain.api`, as far as it needs no training: its names, its columns, its errors and its silence."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_clock import FakeClock
from fake_slurm import FakeSlurm
from run_folders import event, submitted_run

from hpctrain import api
from hpctrain.api import commands, sweep
from hpctrain.api.arguments import overrides_of
from hpctrain.api.metric_columns import metric_columns
from hpctrain.base.package_data import package_data_path
from hpctrain.jobs.run_status import run_status
from hpctrain.launch.preflight.prepare import PreparedRun, RunInputs
from hpctrain.records.history.run_log import BytesSent, MetricRow, ValidSet
from hpctrain.records.run.run import read_run
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import record_job

FUNCTIONS = [getattr(api, name) for name in api.__all__ if inspect.isfunction(getattr(api, name))]


def row(step: int, generation: int = 0, **figures: object) -> MetricRow:
    known: dict[str, object] = {
        "time_s": 100.0 + step, "step_time_s": 0.5, "loss": 3.0 - step, "lr": 1e-3, "tokens": 64, "samples": 8 * step,
        "tokens_per_s": 128.0, "bytes_sent": BytesSent(dp=7), "stage_time_s": [0.1, 0.2], "micro_batches": [4],
    }  # fmt: skip
    return MetricRow.model_validate({"step": step, "generation": generation, **known, **figures})


def test_importing_it_loads_no_torch_and_no_click() -> None:
    code = "import sys, hpctrain.api; print([name for name in ('torch', 'click', 'scipy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_page_names_what_the_module_exports_and_nothing_else(repository: Path) -> None:
    page = (repository / "docs/python.md").read_text()
    assert [name for name in api.__all__ if f"`{name}" not in page] == []
    used = {
        node.attr
        for block in page.split("```python\n")[1:]
        for node in ast.walk(ast.parse(block.partition("```")[0]))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "api"
    }
    assert used
    assert used <= set(api.__all__)


def test_every_property_and_method_of_a_run_is_on_the_page(repository: Path) -> None:
    page = (repository / "docs/python.md").read_text()
    names = [name for name in vars(api.LoadedRun) if not name.startswith("_")]
    assert len(names) > 12
    assert [name for name in names if f"run.{name}" not in page] == []


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_function_says_its_arguments_and_its_errors(function) -> None:
    text = inspect.getdoc(function) or ""
    assert "Raises:" in text
    names = [name for name in inspect.signature(function).parameters if name not in ("run_file", "output")]
    assert [name for name in names if f"    {name}: " not in text and f"`{name}`" not in text] == []


def test_metrics_are_columns_of_one_length() -> None:
    columns = metric_columns([row(1), row(2, valid_loss=1.5, valid_sets={"a": ValidSet.of(0.0)}, skipped=True)])
    assert {column.shape for column in columns.values()} == {(2,)}
    assert columns["step"].dtype == np.int64
    assert columns["skipped"].tolist() == [False, True]
    np.testing.assert_array_equal(columns["valid_loss"], [np.nan, 1.5])
    np.testing.assert_array_equal(columns["valid_sets.a.perplexity"], [np.nan, 1.0])
    assert columns["bytes_sent.dp"].tolist() == [7.0, 7.0]
    assert columns["stage_time_s.1"].tolist() == [0.2, 0.2]
    assert not {"schema", "placement", "mfu"} & set(columns)


def test_no_steps_are_no_columns() -> None:
    assert metric_columns([]) == {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with three rows of metrics, of which one was repeated."""
    made = submitted_run(tmp_path / "runs", None, event("generation_started", members=["gpu1"]))
    rows = [row(1), row(2), row(2, generation=1, loss=9.0)]
    (made / "metrics.jsonl").write_text("".join(json.dumps(item.to_json()) + "\n" for item in rows))
    return made


def test_a_run_is_found_by_its_name_and_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    run = api.load_run("gpt")
    assert run.folder == folder
    assert run == api.load_run(folder)
    assert (run.name, run.job_id, run.topology, run.plan, run.attempts) == ("gpt", None, None, None, [])
    assert run.metrics["loss"].tolist() == [2.0, 9.0]
    assert [item.generation for item in run.metric_rows] == [0, 0, 1]
    assert [item.kind for item in run.events] == ["generation_started"]
    assert replace(run.status(), last_sign_s=None) == replace(run_status(folder), last_sign_s=None)
    assert run.checkpoints == []
    with pytest.raises(api.InputError, match="has no checkpoint yet"):
        run.load_checkpoint()


def test_the_newest_plan_and_the_topology_are_checked_objects(folder: Path, repository: Path) -> None:
    topology = api.Topology.read(package_data_path("topology", "laptop-4-nodes.json"))
    topology.write(folder / "topology.json")
    assert api.load_run(folder).topology == topology


def test_a_run_of_others_is_not_loaded(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(api.UntrustedError):
        api.load_run(folder)


def test_an_unknown_run_names_the_nearest_and_prints_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent.parent)
    with pytest.raises(api.InputError, match="nearest: gpt"):
        api.load_run("gpt2")
    assert capsys.readouterr() == ("", "")


def test_waiting_for_a_run_ends_with_its_time(folder: Path) -> None:
    for name in ("events.jsonl", "metrics.jsonl"):
        (folder / name).unlink()
    said: list[str] = []
    with pytest.raises(TimeoutError, match=r"gpt: it is .* after") as raised:
        api.wait(folder, 0.0, progress=said.append)
    assert isinstance(raised.value, api.HpctrainError)
    assert [line.split(":")[0] for line in said] == ["gpt"]


def test_waiting_for_a_run_that_does_nothing_more_returns_its_status(folder: Path) -> None:
    assert api.wait(folder).state == "unknown"  # the newest line is old


def test_nothing_is_cancelled_that_was_never_submitted(folder: Path) -> None:
    with pytest.raises(api.InputError, match="never submitted"):
        api.cancel(folder)


def test_a_probe_is_of_this_machine_or_of_a_job() -> None:
    with pytest.raises(api.InputError, match="give one of local"):
        api.probe()
    with pytest.raises(api.InputError, match="found partition with local"):
        api.probe(local=2, partition="gpu")
    with pytest.raises(api.InputError, match="found colour; allowed for the job: partition"):
        api.probe(nodes=2, colour="red")
    with pytest.raises(api.InputError, match="probe: local: found 0; allowed: 1 or more"):
        api.probe(local=0)
    with pytest.raises(api.InputError, match="mode: found 'fast'; allowed: health, full, sampled"):
        api.probe(local=2, mode="fast")


def test_arguments_are_checked_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    run = api.load_run(folder)
    with pytest.raises(api.InputError, match="dtype: found 'int8'; allowed: float32, bfloat16, float16"):
        run.export(tmp_path / "model", dtype="int8")
    with pytest.raises(api.InputError, match="file_format: found 'zip'; allowed: hf, dcp"):
        run.export(tmp_path / "model", file_format="zip")  # type: ignore[arg-type]
    with pytest.raises(api.InputError, match="split: found 'half'"):
        run.evaluate("text", split="half")
    with pytest.raises(api.InputError, match="samples: found 0"):
        run.evaluate("text", samples=0)
    with pytest.raises(api.InputError, match="data: none was given"):
        run.evaluate()
    with pytest.raises(api.InputError, match="train: nodes: found 0; allowed: 1 or more"):
        api.train("run.yaml", nodes=0)
    with pytest.raises(api.InputError, match="resume: nodes: found -1"):
        api.resume(run, nodes=-1)


def test_settings_are_values_of_the_run_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 1\nmodel: {preset: tiny-1m}\ndata: {train: [data]}\nbatch: {global: 8}\n")
    texts = overrides_of({"optimizer.lr": 1e-05, "name": "3-4", "data.train": ["a", "b c"], "seed": 7})
    run = read_run(path, texts)
    assert (run.optimizer.lr, run.name, run.seed) == (1e-05, "3-4", 7)
    assert [Path(item).name for item in run.data.train] == ["a", "b c"]
    with pytest.raises(api.InputError, match="settings: a value cannot be written"):
        overrides_of({"name": object()})


def test_inside_of_a_job_submit_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr("hpctrain.launch.queueing.prepare", prepared)
    (tmp_path / "run.yaml").write_text(RUN_TEXT)
    with pytest.raises(api.RefusedError, match="inside of job 7"):
        api.submit("run.yaml")
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A simulated cluster that `hpctrain.api` submits to, with a run file in the current folder."""
    fake = FakeSlurm()
    monkeypatch.chdir(tmp_path)
    clock = FakeClock(wall=fake.now, on_sleep=lambda seconds: fake.advance(round(seconds)))
    for module in (commands, sweep):
        monkeypatch.setattr(module, "SystemRunner", lambda: fake)
        monkeypatch.setattr(module, "SystemClock", lambda: clock)
    monkeypatch.setattr("hpctrain.jobs.run_status.SystemRunner", lambda: fake)
    monkeypatch.setattr("hpctrain.runs.file_system.file_system_of", lambda path: "nfs4")
    for module in ("queueing", "sweep"):
        monkeypatch.setattr(f"hpctrain.launch.{module}.prepare", prepared)
    monkeypatch.setattr("hpctrain.launch.queueing.submit_job", lambda folder, *_: recorded(folder, fake.submit()))
    for name in ("HPCTRAIN_RUNS", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.yaml").write_text(RUN_TEXT)
    return fake


def test_submit_checks_queues_and_returns_the_run_and_cancel_takes_it_back(
    cluster: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    run = api.submit("run.yaml", settings={"name": "queued", "seed": 5}, progress=said.append)
    assert (run.name, run.run.seed, run.status().state) == ("queued", 5, "starting")
    assert api.load_run(str(run.job_id)) == run
    assert any(line.startswith("partition ") for line in said)
    with pytest.raises(api.WaitTimeoutError, match="queued: it is starting"):
        api.wait(run, 0.0)
    assert "cancelled" in api.cancel("queued")
    assert run.status().state == "cancelled"
    assert api.wait(run).state == "cancelled"
    assert capsys.readouterr().out == ""


def test_a_sweep_is_one_job_array_and_found_again_by_its_name(
    cluster: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [{"optimizer.lr": lr, "precision": "fp32"} for lr in (1e-3, 3e-4)]
    runs = api.submit_sweep("run.yaml", points, settings={"name": "rates"}, array_limit=1)
    assert [run.name for run in runs] == ["rates-lr0.001-precisionfp32", "rates-lr0.0003-precisionfp32"]
    assert [run.run.optimizer.lr for run in runs] == [1e-3, 3e-4]
    array, task = str(runs[0].job_id).split("_")
    assert (task, runs[1].job_id) == ("0", f"{array}_1")
    assert api.load_sweep("rates") == runs
    with pytest.raises(api.InputError, match="it is one run and no sweep"):
        api.load_sweep(runs[0].folder)
    assert capsys.readouterr().out == ""


def test_the_sweep_of_the_page_names_the_run_with_the_smallest_loss(
    cluster: FakeSlurm, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python_blocks = re.findall(r"```python\n(.*?)```", (repository / "docs/python.md").read_text(), re.DOTALL)
    (block,) = [block for block in python_blocks if "submit_sweep" in block]
    losses = iter([3.0, 2.5, 2.75, None, 4.0, 5.0])

    def ended(run: api.LoadedRun) -> api.RunStatus:
        return replace(run.status(), state="done", loss=next(losses))

    monkeypatch.setattr(api, "wait", ended)
    exec(compile(block, "docs/python.md", "exec"), {})
    assert capsys.readouterr().out == "rates-lr0.001-seed1 2.5\n"
    assert len(api.load_sweep("rates")) == 6


@pytest.mark.parametrize(
    ("points", "more", "said"),
    [
        ([], {}, "submit_sweep: runs: found 0; allowed: 1 to 1000"),
        ([{"seed": 1}], {"array_limit": 0}, "submit_sweep: array_limit: found 0"),
        ([{"seed": 1}, {"seed": 1}], {}, "found the run seed=1 twice"),
        ([{"cluster.nodes": 1}], {}, "cluster.nodes: the runs of a sweep are tasks of one job array"),
        ([{"seed": 1}], {"settings": {"seed": 2}}, "set the same key"),
        ([{"seed": 1}, {"seed": -1}], {}, "run 2 of 2"),
    ],
)
def test_a_sweep_with_a_mistake_leaves_nothing(
    cluster: FakeSlurm, points: list[dict[str, int]], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(api.InputError) as caught:
        api.submit_sweep("run.yaml", points, **more)
    assert said in str(caught.value)
    assert not Path("runs").exists()


RUN_TEXT = """\
steps: 1
model: {dims: {layers: 2, dim: 64, heads: 4, vocab: 256}}
data: {train: [data]}
batch: {global: 8}
cluster: {kind: slurm, nodes: 2}
"""


def prepared(given: RunInputs, *_: object, **__: object) -> PreparedRun:
    """The run of a run file without a look at its data."""
    return PreparedRun(given.run(), given.run().spec(), [], None, None)


def recorded(folder: RunFolder, job: int) -> str:
    """Record the job's id as `submit_job` does."""
    record_job(folder.path, str(job))
    return str(job)


@pytest.mark.parametrize("function", [api.train, api.resume], ids=lambda function: function.__name__)
def test_training_in_another_thread_is_refused_as_cancel_could_not_stop_it(function, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(api.RefusedError, match="call it in the main thread"):
        pool.submit(function, tmp_path / "run.yaml").result()
