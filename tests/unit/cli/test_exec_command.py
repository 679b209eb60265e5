"""`hpctrain exec`: the command reaches the right job and node, or the person learns why not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import RUN, event, submitted_run

from hpctrain.base.errors import CommandError, InputError, RefusedError
from hpctrain.base.process import SystemRunner
from hpctrain.cli.commands import manage
from hpctrain.launch.step import choose_node, step_command
from hpctrain.runs.folder import lock_run_folder


@pytest.fixture
def running(fake, runs):
    """A run whose job runs on gpu1 and gpu2."""
    folder = submitted_run(runs, fake.submit("--nodes=2"), event("generation_started", members=["gpu1", "gpu2"]))
    attempt = {"attempt": 0, "job_id": "1", "nodes": ["gpu1", "gpu2"]}
    (folder / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    return folder


def test_a_command_is_one_more_step_of_the_job(fake, running, hpctrain, monkeypatch):
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet,mask_cpu:0x1")
    (running / "code").mkdir()
    result = hpctrain("exec", "gpt", "--", "nvidia-smi", "--help", "--", "-x")
    assert result.exit_code == 7
    argv, env = fake.argvs[-1], fake.envs[-1]
    assert argv[:3] == ("srun", "--jobid=1", "--overlap")
    assert {"--nodelist=gpu1", "--nodes=1", "--ntasks=1"} <= set(argv)
    assert argv[-4:] == ("nvidia-smi", "--help", "--", "-x")
    assert "--pty" not in argv
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(running / "code")
    assert env["HPCTRAIN_RUN_FOLDER"] == str(running)
    assert not {"SLURM_CPU_BIND", "SLURM_TIME_FORMAT"} & env.keys()


def test_a_node_can_be_named(fake, running, hpctrain):
    hpctrain("exec", "1", "gpu2", "--", "hostname")
    assert "--nodelist=gpu2" in fake.argvs[-1]
    error = hpctrain("exec", "1", "gpu3", "--", "hostname").exception
    assert isinstance(error, InputError)
    assert str(error) == "node: found 'gpu3'; allowed: gpu1, gpu2"


def test_a_lost_node_is_not_the_default():
    nodes = ["gpu1", "gpu2", "gpu3"]
    assert choose_node(None, nodes, ["gpu2", "gpu3"], nodes) == "gpu2"
    assert choose_node(None, nodes, [], nodes) == "gpu1"
    assert choose_node(None, ["gpu1"], ["gpu1"], ["gpu2"]) == "gpu2"
    assert choose_node("gpu1", nodes, ["gpu2", "gpu3"], nodes) == "gpu1"


def test_a_terminal_is_passed_through():
    assert "--pty" in step_command("1", "gpu1", [], ["bash"], terminal=True)


def test_the_commands_words_survive_the_setup_lines():
    argv = step_command("1", "gpu1", ["export A='b c'"], ["printf", "%s|", "$A", "x y"], terminal=False)
    done = subprocess.run(argv[argv.index("bash") :], capture_output=True, text=True, check=True)
    assert done.stdout == "$A|x y|"
    argv = step_command("1", "gpu1", ["export A='b c'"], ["sh", "-c", "echo $A; exit 3"], terminal=False)
    done = subprocess.run(argv[argv.index("bash") :], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("b c\n", 3)


def test_a_dry_run_runs_nothing(fake, running, hpctrain):
    result = hpctrain("exec", "gpt", "--dry-run", "--", "echo", "a b")
    assert result.exit_code == 0
    assert result.stdout.startswith("srun --jobid=1 --overlap")
    assert result.stdout.endswith("echo 'a b'\n")
    assert "srun" not in [argv[0] for argv in fake.argvs]


def ended(fake, runs):
    submitted_run(runs, fake.submit("--nodes=1"), event("finished", reason="all steps are done"))
    fake.finish("1")


def failed(fake, runs):
    submitted_run(runs, fake.submit("--nodes=1"))
    fake.finish("1", code=1)


def queued(fake, runs):
    fake.submit("--nodes=3")
    submitted_run(runs, fake.submit("--nodes=1"))


def never(fake, runs):
    submitted_run(runs, None)


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (ended, "it is done .*hpctrain report"),
        (failed, "it is failed .*exit code 1.*hpctrain resubmit"),
        (queued, "it is queued .*wait until it runs"),
        (never, "it is queued"),
    ],
)
def test_a_run_that_does_not_run_is_refused_with_its_state(fake, runs, hpctrain, before, words):
    before(fake, runs)
    error = hpctrain("exec", "gpt", "--", "hostname").exception
    assert isinstance(error, RefusedError)
    with pytest.raises(RefusedError, match=words):
        raise error


def test_a_controller_that_is_away_is_said(fake, running, hpctrain):
    fake.away = True
    assert "controller is away" in str(hpctrain("exec", "gpt", "--", "hostname").exception)


def test_no_command_is_said_before_anything_is_asked(fake, running, hpctrain):
    asked = len(fake.argvs)
    for words in (["exec", "gpt"], ["exec", "gpt", "gpu1", "--"]):
        error = hpctrain(*words).exception
        assert isinstance(error, InputError)
        assert "behind `--`" in str(error)
    assert len(fake.argvs) == asked


@pytest.fixture
def local(runs):
    """A run of this machine, on two virtual nodes."""
    folder = submitted_run(runs, None)
    (folder / "run.yaml").write_text(json.dumps({**RUN, "cluster": {"nodes": "2"}}))
    attempt = {"attempt": 0, "nodes": ["local0", "local1"]}
    (folder / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    return folder


def test_beside_a_local_run_the_command_simply_runs(fake, local, hpctrain):
    lock = lock_run_folder(local)
    try:
        assert hpctrain("exec", "gpt", "--", "hostname", "-s").exit_code == 7
        assert fake.argvs[-1] == ("hostname", "-s")
        assert fake.envs[-1]["HPCTRAIN_RUN_FOLDER"] == str(local)
        assert fake.envs[-1]["GLOO_SOCKET_IFNAME"] == "lo"
        assert isinstance(hpctrain("exec", "gpt", "local7", "--", "hostname").exception, InputError)
        (local / "run.lock").write_text("1 login2\n")
        assert "on that machine" in str(hpctrain("exec", "gpt", "--", "hostname").exception)
    finally:
        lock.close()
    assert isinstance(hpctrain("exec", "gpt", "--", "hostname").exception, RefusedError)


def test_the_process_becomes_the_command():
    """Its exit code comes back, its input is ours, and a closed pipe ends it."""
    program = (
        "import os; from hpctrain.base.process import SystemRunner; SystemRunner().replace_process({!r}, os.environ)"
    )
    argv = [sys.executable, "-c", program.format(["sh", "-c", "cat; kill -PIPE $$; exit 5"])]
    env = {**os.environ, "PYTHONPATH": str(Path(manage.__file__).parents[2])}
    done = subprocess.run(argv, input="hello", capture_output=True, text=True, env=env, check=False)
    assert (done.stdout, done.returncode) == ("hello", -13)


def test_a_program_that_is_not_there_is_said():
    before = signal.getsignal(signal.SIGXFSZ)
    with pytest.raises(CommandError, match="nosuch: cannot start"):
        SystemRunner().replace_process(["nosuch"], os.environ)
    assert signal.getsignal(signal.SIGXFSZ) is before
