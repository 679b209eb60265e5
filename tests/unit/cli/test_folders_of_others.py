"""No command believes, runs, writes or signals anything for a run folder that is not this user's alone."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_folders import RUN, event, submitted_run
from two_users import OTHER, PROJECT, give

from hpctrain.base.errors import HpctrainError
from hpctrain.base.package_data import package_data_path
from hpctrain.jobs.dependencies import refresh_dependent_runs
from hpctrain.runs.locate import record_job
from hpctrain.runs.prune import removable, remove_all
from hpctrain.slurm.commands import Slurm

pytestmark = pytest.mark.requires("root")

COMMANDS: dict[str, list[str]] = {
    "status": ["status", "RUN"],
    "watch": ["watch", "RUN"],
    "logs": ["logs", "RUN"],
    "report": ["report", "RUN"],
    "export": ["export", "RUN", "-o", "OUT"],
    "eval": ["eval", "RUN", "OUT"],
    "prune": ["prune", "RUN", "--older-than", "0h", "--yes"],
    "cancel": ["cancel", "RUN"],
    "cancel --now": ["cancel", "RUN", "--now"],
    "exec": ["exec", "RUN", "--", "touch", "OUT"],
    "resubmit": ["resubmit", "RUN"],
    "resubmit --own-job": ["resubmit", "RUN", "--own-job"],
    "train --resume": ["train", "--resume", "RUN"],
    "plan --calibrate-from": ["plan", "OWN", "--topology", "TOPOLOGY", "--calibrate-from", "RUN"],
}
"""Every command that takes a run. RUN is the folder."""


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    """A FIFO that is waited for ends the test and not the suite."""
    signal.alarm(120)
    yield
    signal.alarm(0)


def hostile_run(runs: Path, victim: Path) -> Path:
    """A run folder that would run code, had anybody believed it: its model, its script, its pickles, its links."""
    folder = submitted_run(runs, "1", event("failed", reason="come and resubmit me"))
    hostile = {**RUN, "model": {"import": "evil:Model"}, "cluster": {**RUN["cluster"], "setup": f"touch {victim}"}}
    (folder / "run.yaml").write_text(json.dumps(hostile))
    (folder / "code").mkdir()
    (folder / "code" / "evil.py").write_text(f"open({str(victim)!r}, 'w')")
    (folder / "job.sh").write_text(f"touch {victim}\n")
    (folder / "key").write_text("00")
    (folder / "submitit").mkdir()
    (folder / "submitit" / "1_submitted.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (folder / "followers").symlink_to(victim)
    (folder / "cancelled").symlink_to(victim)
    return folder


def theirs(folder: Path) -> str:
    give(folder, OTHER)
    return f"belongs to another user (uid {OTHER})"


def run_file_of_theirs(folder: Path) -> str:
    os.chown(folder / "run.yaml", OTHER, OTHER)
    return f"belongs to another user (uid {OTHER})"


def open_to_all(folder: Path) -> str:
    folder.chmod(0o1777)
    return "can be written by others (mode 1777)"


def open_to_a_group(folder: Path) -> str:
    os.chown(folder, 0, PROJECT)
    folder.chmod(0o2770)
    return f"can be written by group {PROJECT} (mode 2770)"


def run_file_open_to_all(folder: Path) -> str:
    (folder / "run.yaml").chmod(0o666)
    return "can be written by others (mode 666)"


def linked_run_file(folder: Path) -> str:
    (folder / "run.yaml").rename(folder / "real.yaml")
    (folder / "run.yaml").symlink_to("real.yaml")
    return "is a symbolic link"


def fifo_for_a_run_file(folder: Path) -> str:
    (folder / "run.yaml").unlink()
    os.mkfifo(folder / "run.yaml")
    return "is a FIFO"


def somebody_s_link(folder: Path) -> str:
    folder.rename(folder.with_name("real"))
    folder.symlink_to("real")
    os.chown(folder, OTHER, OTHER, follow_symlinks=False)
    return f"is a symbolic link of another user's (uid {OTHER})"


HOSTILITIES = [
    theirs, run_file_of_theirs, open_to_all, open_to_a_group, run_file_open_to_all, linked_run_file,
    fifo_for_a_run_file, somebody_s_link,
]  # fmt: skip


def everything(folder: Path) -> dict[str, tuple[int, int, float]]:
    """What lies in a folder, with mode, owner and time: whether anybody touched it."""
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_uid, status.st_mtime)
    return found


def words_for(words: list[str], run: str, tmp_path: Path) -> list[str]:
    own = tmp_path / "own.yaml"
    own.write_text(json.dumps({**RUN, "model": {"dims": {"layers": 4, "dim": 64, "heads": 4, "vocab": 256}}}))
    topology = str(package_data_path("topology", "laptop-4-nodes.json"))
    named = {"RUN": run, "OUT": str(tmp_path / "out"), "OWN": str(own), "TOPOLOGY": topology}
    return [named.get(word, word) for word in words]


@pytest.mark.parametrize("make_hostile", HOSTILITIES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_hostile_folder_is_refused_with_one_line_and_nothing_happens(
    command: str, make_hostile: Callable[[Path], str], fake, runs, hpctrain, tmp_path, monkeypatch
) -> None:
    job = fake.submit("--nodes=2")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    victim = tmp_path / "victim"
    folder = hostile_run(runs, victim)
    expected = make_hostile(folder)
    before, asked = everything(runs), list(fake.argvs)
    result = hpctrain(*words_for(COMMANDS[command], str(folder), tmp_path))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # --own-job ignores it
    error = result.exception
    assert isinstance(error, HpctrainError), result.output
    assert error.exit_code in (2, 4)
    assert expected in str(error)
    assert "\n" not in str(error)
    assert everything(runs) == before
    assert fake.argvs == asked, "Slurm was asked, or something was started"
    assert not victim.exists()
    assert not (tmp_path / "out").exists()


def test_no_process_is_signalled_for_a_lock_of_somebody_else_s(fake, runs, hpctrain, tmp_path) -> None:
    folder = submitted_run(runs, None)
    (folder / "run.yaml").write_text(json.dumps({**RUN, "cluster": {"kind": "local", "nodes": "1"}}))
    process = subprocess.Popen(["sleep", "60"])
    lock = folder / "run.lock"
    lock.write_text(f"{process.pid} {os.uname().nodename}\n")
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            give(folder, OTHER)
            for words in (["cancel", str(folder)], ["cancel", str(folder), "--now"]):
                assert "belongs to another user" in str(hpctrain(*words).exception)
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()


READ_BY = {
    "job_id": ["status", "cancel", "resubmit"],
    "events.jsonl": ["status", "logs --rank 0", "report", "watch", "resubmit"],
    "metrics.jsonl": ["status", "report", "watch"],
    "attempts.jsonl": ["exec", "logs --attempt 0"],
    "successors.jsonl": ["status", "cancel"],
    "plan.json": ["report"],
    "topology.json": ["report"],
    "run.lock": ["status", "prune"],
    "key": ["exec", "resubmit"],
    "logs/1.job.log": ["logs"],
}
"""File of a run folder -> commands that read it."""


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def put_theirs(path: Path) -> None:
    path.write_text("")
    os.chown(path, OTHER, OTHER)


@pytest.mark.parametrize("put", [put_fifo, put_link, put_theirs])
@pytest.mark.parametrize(("name", "command"), [(name, command) for name in READ_BY for command in READ_BY[name]])
def test_a_file_in_it_that_is_not_what_this_user_wrote_is_refused(
    name: str, command: str, put: Callable[[Path], None], fake, runs, hpctrain
) -> None:
    folder = submitted_run(runs, fake.submit("--nodes=2"), event("generation_started", members=["gpu1"]))
    (folder / name).unlink(missing_ok=True)
    put(folder / name)
    verb, *options = command.split()
    more = {"exec": ["--", "true"]}.get(verb, [])
    before, jobs = everything(folder), dict(fake.jobs)
    error = hpctrain(verb, str(folder), *options, *more).exception
    assert isinstance(error, HpctrainError), error
    assert error.exit_code == 2
    assert f"{folder.resolve() / name}: " in str(error) or f"{folder / name}: " in str(error)
    assert everything(folder) == before
    assert fake.jobs == jobs


def test_a_name_or_a_job_id_finds_my_run_beside_hostile_ones(fake, runs, hpctrain) -> None:
    mine = submitted_run(runs, fake.submit("--nodes=1"))
    job = (mine / "job_id").read_text().strip()
    for number, owner in enumerate((OTHER, OTHER + 1)):
        folder = submitted_run(runs, job, name=f"gpt-2027010{number + 1}T000000Z-00ff")
        give(folder, owner)
    fifo = submitted_run(runs, None, name="fifo-20270101T000000Z-00ff")
    os.mkfifo(fifo / "job_id")
    for word in ("gpt", job):
        assert json.loads(hpctrain("status", word, "--json").stdout)["folder"] == str(mine)


def test_a_name_that_only_a_hostile_folder_has_tells_why(fake, runs, hpctrain) -> None:
    give(submitted_run(runs, "77", name="their-20270101T000000Z-00ff"), OTHER)
    error = hpctrain("cancel", "their").exception
    assert "their-20270101T000000Z-00ff: belongs to another user" in str(error)
    error = hpctrain("cancel", "77").exception
    assert "77: no such run" in str(error)
    assert f"1 run folder left out, as untrusted: 1 × belongs to another user (uid {OTHER})" in str(error)


def test_list_leaves_out_other_peoples_runs_with_one_line(fake, runs, hpctrain) -> None:
    mine = submitted_run(runs, None)
    for number in range(1, 4):
        give(submitted_run(runs, None, name=f"their-2027010{number}T000000Z-00ff"), OTHER)
    submitted_run(runs, None, name="open-20270101T000000Z-00ff").chmod(0o777)
    (runs / "no run").mkdir(mode=0o777)
    os.mkfifo(runs / "a-fifo-20270101T000000Z-00ff")
    result = hpctrain("list", "--json")
    assert [row["folder"] for row in json.loads(result.stdout)] == [str(mine)]
    assert result.stderr.splitlines() == [
        f"hpctrain: 4 run folders left out, as untrusted: 3 × belongs to another user (uid {OTHER}), "
        "1 × can be written by others (mode 777)"
    ]


def test_list_tells_what_is_wrong_with_a_folder_of_mine_beside_the_others(fake, runs, hpctrain) -> None:
    submitted_run(runs, None)
    odd = submitted_run(runs, None, name="odd-20270101T000000Z-00ff")
    os.mkfifo(odd / "job_id")
    rows = json.loads(hpctrain("list", "--json").stdout)
    assert [row["state"] for row in rows] == ["queued", "unknown"]
    assert f"{odd / 'job_id'}: is a FIFO, expected a regular file" in rows[1]["reason"]


def test_prune_of_everything_leaves_other_peoples_runs_alone(fake, runs, hpctrain) -> None:
    folder = submitted_run(runs, None)
    give(folder, OTHER)
    before = everything(folder)
    hpctrain("prune", "--older-than", "0h", "--yes")
    assert everything(folder) == before


def test_a_job_that_comes_back_does_not_enter_a_hostile_folder(fake, runs, hpctrain, tmp_path, monkeypatch) -> None:
    job = fake.submit("--nodes=2")
    victim = tmp_path / "victim"
    folder = hostile_run(runs, victim)
    record_job(folder, job)
    give(folder, OTHER)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    before, asked = everything(runs), len(fake.argvs)
    result = hpctrain("submit", str(tmp_path / "no.yaml"), "--own-job")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert "1 run folder left out, as untrusted: 1 × belongs to another user" in result.stderr
    assert isinstance(result.exception, HpctrainError)
    assert everything(runs) == before
    assert not {argv[0] for argv in fake.argvs[asked:]} & {"bash", "sbatch"}
    assert not victim.exists()


def test_runs_on_another_file_system_and_links_of_mine_work(fake, runs, hpctrain, tmp_path) -> None:
    far = tmp_path / "scratch" / "me"
    mine = submitted_run(far, "5")
    runs.symlink_to(far)
    (tmp_path / "link").symlink_to(mine)
    for word in ("gpt", "5", "link", str(runs / mine.name)):
        result = hpctrain("status", word, "--json")
        assert result.exit_code == 0, result.exception
        assert Path(json.loads(result.stdout)["folder"]).resolve() == mine.resolve()


def test_a_group_that_is_trusted_by_name_may_write(fake, runs, hpctrain, monkeypatch) -> None:
    folder = submitted_run(runs, None)
    os.chown(folder, 0, PROJECT)
    folder.chmod(0o2770)
    error = hpctrain("status", "gpt").exception
    assert f"set HPCTRAIN_TRUSTED_GROUPS={PROJECT} if you trust all of them" in str(error)
    monkeypatch.setenv("HPCTRAIN_TRUSTED_GROUPS", str(PROJECT))
    assert hpctrain("status", "gpt").exit_code == 0


def test_a_run_that_waits_and_is_not_mine_any_more_is_left_as_it_is(fake, runs) -> None:
    mine = submitted_run(runs, fake.submit("--nodes=1"))
    follower = submitted_run(runs, fake.submit("--nodes=1", "--hold"), name="next-20270101T000000Z-00ff")
    (mine / "followers").write_text(f"{follower}\n")
    give(follower, OTHER)
    before = len(fake.argvs)
    (line,) = refresh_dependent_runs(mine, Slurm(fake), {})
    assert line.startswith("next-20270101T000000Z-00ff is left as it is: ")
    assert f"belongs to another user (uid {OTHER})" in line
    assert len(fake.argvs) == before


def somebody_s_link_to_it(run: Path, precious: Path) -> None:
    run.symlink_to(precious)
    os.chown(run, OTHER, OTHER, follow_symlinks=False)


def moved_there(run: Path, precious: Path) -> None:
    precious.rename(run)


@pytest.mark.parametrize("swap", [somebody_s_link_to_it, moved_there])
def test_what_takes_a_run_s_place_after_prune_listed_it_is_not_emptied(
    swap: Callable[[Path, Path], None], runs: Path, tmp_path: Path
) -> None:
    run = submitted_run(runs, None)
    later = run.stat().st_mtime + 365 * 86400.0
    listed = removable(run, later, 0.0, 1)
    precious = tmp_path / "precious"
    (precious / "years").mkdir(parents=True)
    (precious / "years" / "of work").write_text("")
    run.rename(tmp_path / "aside")
    swap(run, precious)
    with pytest.raises(HpctrainError):
        remove_all(listed, lambda folder: {}, lambda: later)
    assert (run / "years" / "of work").exists()
