"""`hpctrain prune`: what it lists is what goes, and nothing goes of a run that lives."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from run_folders import RUN, event, submitted_run

from hpctrain.base.errors import CheckpointError, InputError
from hpctrain.checkpoint.published import describe_file, newest
from hpctrain.records.history.manifest import Manifest
from hpctrain.runs import prune
from hpctrain.runs.folder import lock_run_folder
from hpctrain.runs.prune import superfluous_checkpoints

DAY_S = 86400
SIZE = 5000


def checkpoint(folder: Path, step: int) -> Path:
    """A checkpoint that verifies."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(mode=0o755)
    (path / "shard").write_bytes(bytes([step % 256]) * SIZE)
    files = [describe_file(path / "shard")]
    more = {"generation": 0, "samples": 0, "seed": 0, "run_sha256": "", "model_sha256": "", "world_size": 1}
    Manifest(step=step, files=files, **more).write(path / "manifest.json")
    return path


def age(folder: Path, days: float) -> None:
    """Let the run lie for some days."""
    then = time.time() - days * DAY_S
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (then, then))


def made(runs: Path, name: str, days: float, job: str | None = None, kind: str = "local") -> Path:
    """A run with checkpoints of steps 10, 20 and 30."""
    folder = submitted_run(runs, job, event("failed"), name=f"{name}-20260101T000000Z-00ff")
    (folder / "run.yaml").write_text(json.dumps({**RUN, "cluster": {"kind": kind, "nodes": "2"}}))
    for step in (10, 20, 30):
        checkpoint(folder, step)
    age(folder, days)
    return folder


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def told(result) -> dict:
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def paths(result, folder: Path) -> list[str]:
    return [str(Path(item["path"]).relative_to(folder)) for item in told(result)["items"]]


def test_without_yes_it_only_lists(runs, fake, hpctrain):
    folder = made(runs, "gpt", days=40)
    before = sorted(runs.rglob("*"))
    result = hpctrain("prune")
    assert result.exit_code == 0
    assert "step-00000010" in result.stdout
    assert "step-00000030 is newer and verified" in result.stdout
    assert "would be free; nothing was removed, --yes does it" in result.stdout
    assert "step-00000030  (" not in result.stdout
    hpctrain("prune", "--older-than", "30d")
    assert sorted(runs.rglob("*")) == before
    assert steps(folder) == [10, 20, 30]


def test_yes_removes_what_was_listed(runs, fake, hpctrain):
    folder = made(runs, "gpt", days=1)
    listed = told(hpctrain("prune", "--json"))
    assert listed["size_bytes"] > 2 * SIZE
    removed = told(hpctrain("prune", "--yes", "--json"))
    assert removed["items"] == listed["items"]
    assert (listed["removed"], removed["removed"]) == (False, True)
    assert steps(folder) == [30]
    assert newest(folder / "checkpoints")[0].manifest.step == 30
    assert told(hpctrain("prune", "--json"))["items"] == []


def test_more_checkpoints_can_stay(runs, fake, hpctrain):
    folder = made(runs, "gpt", days=1)
    hpctrain("prune", "gpt", "--keep-checkpoints", "2", "--yes")
    assert steps(folder) == [20, 30]
    assert hpctrain("prune", "--keep-checkpoints", "0").exit_code == 2


def test_the_newest_that_verifies_stays_not_the_newest(runs, fake, hpctrain):
    folder = made(runs, "gpt", days=1)
    (folder / "checkpoints" / "step-00000030" / "shard").write_bytes(b"torn")
    age(folder, days=1)
    hpctrain("prune", "--yes")
    assert steps(folder) == [20, 30]
    assert newest(folder / "checkpoints")[0].manifest.step == 20


def test_where_none_verifies_all_stay(runs, fake, hpctrain):
    folder = made(runs, "gpt", days=1)
    for path in folder.glob("checkpoints/*/shard"):
        path.write_bytes(b"torn")
    age(folder, days=1)
    assert told(hpctrain("prune", "--yes", "--json"))["items"] == []
    assert steps(folder) == [10, 20, 30]


def test_only_as_many_are_read_as_stay():
    looked = []

    def check(path: Path) -> None:
        looked.append(path.name)
        if path.name == "c":
            raise CheckpointError("torn")

    found = superfluous_checkpoints([Path(name) for name in "abcd"], 2, check)
    assert looked == ["d", "c", "b"]
    assert found == [(Path("a"), "d is newer and verified"), (Path("c"), "it cannot be used: torn")]


def test_what_killed_writers_left_goes_too(runs, fake, hpctrain):
    folder = made(runs, "gpt", days=1)
    for name in ("skipped-step-00000040", ".step-00000050.tmp", ".replaced-step-00000030"):
        (folder / "checkpoints" / name).mkdir()
    age(folder, days=1)
    found = paths(hpctrain("prune", "gpt", "--keep-checkpoints", "3", "--yes", "--json"), folder)
    assert found == ["checkpoints/.step-00000050.tmp", "checkpoints/skipped-step-00000040"]
    assert (folder / "checkpoints" / ".replaced-step-00000030").exists()


def test_old_runs_go_whole_and_younger_ones_stay(runs, fake, hpctrain):
    old, young = made(runs, "old", days=40), made(runs, "young", days=20)
    kinds = {
        Path(item["path"]): item["kind"] for item in told(hpctrain("prune", "--older-than", "30d", "--json"))["items"]
    }
    assert kinds.pop(old) == "run"
    assert set(kinds.values()) == {"checkpoint"}
    assert all(young in path.parents for path in kinds)
    hpctrain("prune", "--older-than", "30d", "--yes")
    assert list(runs.iterdir()) == [young]
    assert steps(young) == [30]


def test_only_the_runs_that_are_named(runs, fake, hpctrain):
    one, other = made(runs, "one", days=40), made(runs, "other", days=40)
    hpctrain("prune", "one", str(one), "--older-than", "0h", "--yes")
    assert list(runs.iterdir()) == [other]
    assert steps(other) == [10, 20, 30]


def test_what_a_link_points_to_stays(runs, fake, hpctrain, tmp_path):
    folder = made(runs, "gpt", days=1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(bytes(10 * SIZE))
    (folder / "mine").symlink_to(tmp_path / "model")
    then = time.time() - 40 * DAY_S
    age(folder, days=40)
    os.utime(folder / "mine", (then, then), follow_symlinks=False)
    found = told(hpctrain("prune", "--older-than", "4w", "--yes", "--json"))
    assert found["size_bytes"] < 10 * SIZE
    assert not folder.exists()
    assert (tmp_path / "model" / "weights").stat().st_size == 10 * SIZE


def held(folder, fake):
    return lock_run_folder(folder)


def queued(folder, fake):
    pass


def fresh(folder, fake):
    (folder / "metrics.jsonl").touch()


def unanswered(folder, fake):
    fake.away = True


@pytest.mark.parametrize(
    ("before", "job", "words"),
    [
        (held, False, "a process holds it"),
        (queued, True, "its job 1 is RUNNING"),
        (unanswered, True, "cannot tell whether its job 1 has ended"),
        (fresh, False, "its files changed"),
    ],
)
def test_a_run_that_lives_is_never_touched(runs, fake, hpctrain, before, job, words):
    number = fake.submit("--nodes=1") if job else None
    folder = made(runs, "gpt", days=40, job=number, kind="slurm" if job else "local")
    lock = before(folder, fake)
    for more in ([], ["--older-than", "1h"]):
        found = told(hpctrain("prune", "gpt", "--yes", "--json", *more))
        assert found["items"] == []
        assert words in found["kept"][0]
    assert steps(folder) == [10, 20, 30]
    if lock is not None:
        lock.close()


def test_a_job_that_has_ended_or_is_forgotten_keeps_nothing(runs, fake, hpctrain):
    number = fake.submit("--nodes=1")
    folder = made(runs, "gpt", days=40, job=number, kind="slurm")
    fake.finish(number)
    assert len(told(hpctrain("prune", "--json"))["items"]) == 2
    fake.advance(400)
    assert fake.jobs == {}
    hpctrain("prune", "--older-than", "30d", "--yes")
    assert not folder.exists()


def test_a_run_that_comes_to_life_meanwhile_is_left_alone(runs, fake, hpctrain, monkeypatch):
    folder = made(runs, "gpt", days=40)
    before = prune.removable

    def slow(*args):
        found = before(*args)
        (folder / "metrics.jsonl").touch()
        return found

    monkeypatch.setattr("hpctrain.cli.commands.manage.removable", slow)
    result = hpctrain("prune", "--older-than", "30d", "--yes", "--json")
    assert told(result)["items"] == []
    assert "left alone after all" in result.stderr
    assert steps(folder) == [10, 20, 30]


def test_a_report_is_no_sign_of_life(runs, fake, hpctrain):
    folder = made(runs, "gpt", days=40)
    (folder / "report.html").touch()
    assert len(told(hpctrain("prune", "--json"))["items"]) == 2


@pytest.mark.parametrize("text", ["30", "d", "-1d", "3 months"])
def test_an_age_that_cannot_be_read(runs, fake, hpctrain, text):
    error = hpctrain("prune", f"--older-than={text}").exception
    assert isinstance(error, InputError)
    assert "as in 12h, 30d, 8w" in str(error)


def test_no_runs_no_questions(runs, fake, hpctrain):
    assert hpctrain("prune").stdout == "nothing to prune\n"
    assert fake.argvs == []
