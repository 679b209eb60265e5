"""`hpctrain.api` on real runs: the page's programs, the notebook, and the model of a checkpoint."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch
import yaml
from forked_python import run_program
from train_site import CPU_ONLY, Outcome, Site, processes_of, small_topology

from hpctrain import api
from hpctrain.model.build import build_stage
from hpctrain.records.history.run_log import MetricRow
from hpctrain.runs.folder import RunFolder

pytestmark = pytest.mark.slow
NOTEBOOK = "docs/examples/analyse_a_run.ipynb"


@pytest.fixture
def workplace(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the corpus and a run file, which is the current one."""
    run = yaml.safe_load((site.path / "run.yaml").read_text())
    run["data"]["train"] = [str(site.path / "data")]
    run["cluster"] = {"kind": "local", "nodes": 1, "device": "cpu"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "HPCTRAIN_RUNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_page_s_programs_do_what_it_says(repository: Path, workplace: Path) -> None:
    page = (repository / "docs/python.md").read_text()
    blocks = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    first_run, one_job, _ = blocks  # the third one is a sweep, which needs a cluster: tests/unit/api
    done = run_program(f"{first_run}\n{one_job}", cwd=workplace, env={**os.environ, **CPU_ONLY})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    # Two replicas, two stages or one device: the speeds that were measured decide.
    degrees = re.match(r"pp (\d+) × dp (\d+) × tp (\d+) ", lines[0])
    assert degrees is not None
    assert math.prod(map(int, degrees.groups())) in (1, 2)
    assert lines[0].endswith("s a step predicted")
    first, last = (float(word) for word in (lines[1].split()[0], lines[1].split()[2]))
    assert last < first
    assert lines[3] == "['step 10 is on disk', 'step 20 is on disk']"
    assert lines[4].endswith("parameters after step 20")
    assert lines[5].startswith("done 20 ")
    assert api.load_run("second").status().state == "done"


def test_the_notebook_runs_from_its_first_cell_to_its_last(repository: Path, workplace: Path) -> None:
    notebook = nbformat.read(repository / NOTEBOOK, 4)
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs or cell is codes[0] for cell in codes)  # as stored, for readers who run nothing
    assert (repository / NOTEBOOK).stat().st_size < 200_000
    there = {"metadata": {"path": str(workplace)}}
    nbclient.NotebookClient(notebook, timeout=800, kernel_name="python3", resources=there).execute()
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in codes]
    assert printed[1].endswith("done\n")
    assert "image/png" in codes[2].outputs[0].data
    assert "predicted" in printed[3]
    assert printed[4].splitlines()[1].startswith("step 80: thirty one, thirty two,")
    assert printed[5].startswith("loss ")


def test_a_checkpoint_s_model_has_the_loss_that_evaluate_tells(undisturbed: Outcome, tmp_path: Path) -> None:
    assert undisturbed.folder is not None
    run = api.load_run(undisturbed.folder)
    text = "A sentence whose bytes fill exactly one window of this run's data"[:64]
    (tmp_path / "one.txt").write_text(text)
    (tmp_path / "more.txt").write_text("Sentences of which two replicas in two stages get unequal shares. " * 11)
    judged, alone = run.evaluate(tmp_path / "one.txt", tmp_path / "more.txt", step=16)
    assert (judged.samples, alone.samples) == (1, 11)
    (together,) = run.evaluate(tmp_path / "more.txt", step=16, processes=4, pp=2)
    assert together.loss == pytest.approx(alone.loss, rel=1e-6)
    assert together.targets == alone.targets
    model = run.load_checkpoint(16)
    assert not model.training
    end = run.run.spec().vocabulary - 1  # the token behind the bytes ends a document
    tokens = torch.tensor([*text.encode(), end])
    with torch.no_grad():
        logits = model(tokens[None, :-1])
    assert logits.shape == (1, 64, run.run.spec().vocabulary)
    loss = torch.nn.functional.cross_entropy(logits[0], tokens[1:])
    assert float(loss) == pytest.approx(judged.loss, rel=1e-5)


def test_an_existing_module_gets_the_weights_in_its_own_dtype(undisturbed: Outcome) -> None:
    assert undisturbed.folder is not None
    run = api.load_run(undisturbed.folder)
    spec = run.run.spec()
    mine = build_stage(spec, 0, spec.layers, seed=99).to(torch.bfloat16)
    assert run.load_checkpoint(model=mine) is mine
    loaded = dict(run.load_checkpoint().named_parameters())
    for name, parameter in mine.named_parameters():
        assert parameter.dtype == torch.bfloat16
        torch.testing.assert_close(parameter, loaded[name].to(torch.bfloat16), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (torch.nn.Linear(2, 2), "it has no weight, which the model has"),
        (torch.nn.Sequential(), "which the model has not"),
    ],
    ids=["another model", "a part of the model"],
)
def test_a_module_of_another_model_is_refused(undisturbed: Outcome, model: torch.nn.Module, words: str) -> None:
    assert undisturbed.folder is not None
    with pytest.raises(api.InputError, match=words):
        api.load_run(undisturbed.folder).load_checkpoint(model=model)


class StopHereError(Exception):
    """What a program's own function raises."""


def test_an_exception_of_the_program_saves_a_checkpoint_and_the_run_goes_on_later(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in CPU_ONLY.items():
        monkeypatch.setenv(name, value)
    small_topology(1).write(workplace / "one.json")

    def stop(row: MetricRow) -> None:
        if row.step >= 3:
            raise StopHereError

    with pytest.raises(StopHereError):
        api.train(
            "run.yaml", topology="one.json", settings={"steps": 100_000, "checkpoint.every": 50_000}, on_step=stop
        )
    run = api.load_run("test")
    assert processes_of(run.folder) == []
    assert run.status().state == "cancelled"
    (saved,) = run.checkpoints
    seen: list[int] = []
    gone_on = api.resume(run, settings={"steps": saved + 2}, on_step=lambda row: seen.append(row.step))
    assert gone_on == run
    assert seen == [saved + 1, saved + 2]
    assert run.status().state == "done"
    assert len(run.attempts) == 2
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("words", ["run folder ", "may not fit"], ids=["first line", "warning"])
def test_an_exception_right_after_the_start_leaves_no_process(
    words: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CPU_ONLY.items():
        monkeypatch.setenv(name, value)
    small_topology(2).write(workplace / "two.json")
    monkeypatch.setattr("hpctrain.api.training.hf_warnings", lambda run: ["the model may not fit"])

    def fail(line: str) -> None:
        if words in line:
            raise StopHereError

    with pytest.raises(StopHereError):
        api.train("run.yaml", 2, topology="two.json", settings={"steps": 100_000}, progress=fail)
    run = api.load_run("test")
    assert processes_of(run.folder) == []
    assert all("end" in attempt for attempt in RunFolder(run.folder).attempts())


def test_files_of_the_program_s_own_functions_have_the_program_s_umask(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CPU_ONLY.items():
        monkeypatch.setenv(name, value)
    small_topology(1).write(workplace / "one.json")
    before = os.umask(0o022)
    try:
        run = api.train(
            "run.yaml", topology="one.json", settings={"steps": 2},
            on_step=lambda row: (workplace / f"step-{row.step}").touch(),
            progress=lambda line: (workplace / "lines").touch(),
        )  # fmt: skip
    finally:
        os.umask(before)
    for name in ("step-1", "step-2", "lines"):
        assert (workplace / name).stat().st_mode & 0o777 == 0o644
    assert [path.name for path in run.folder.rglob("*") if path.stat().st_mode & 0o077] == []
