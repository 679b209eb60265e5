"""Slurm's commands: what is run, in which environment, and what becomes of each answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from hpctrain.base.errors import CommandError, CommandTimeoutError, InputError
from hpctrain.base.process import CommandResult, SystemRunner
from hpctrain.slurm.commands import (
    ControllerUnreachableError,
    NotConfiguredError,
    Slurm,
    StartEstimate,
    client_environment,
)
from hpctrain.slurm.job import parse_scontrol_job, parse_squeue


class Replying:
    """A Runner that gives one captured reply to everything."""

    def __init__(self, code: int, text: str, on_stdout: bool = False) -> None:
        self._code = code
        self._streams = (text, "") if on_stdout else ("", text)

    def run(self, argv, timeout_s=None, env=None):
        return CommandResult(tuple(argv), self._code, *self._streams)

    def start(self, argv, env=None, log=None, keep_fds=()):
        raise NotImplementedError


@pytest.fixture
def replying(captured):
    """By name of a section: Slurm whose clients say that."""

    def made(name: str, on_stdout: bool = False) -> Slurm:
        for section, text in captured.sections("replies.txt").items():
            known, code = section.split()
            if known == name:
                return Slurm(Replying(int(code), text + "\n", on_stdout), {})
        raise KeyError(name)

    return made


def test_a_job_lives(fake, slurm):
    job_id = fake.submit("-N", "2", "-t", "10", "job.sh")
    job = slurm.job(job_id)
    assert (job.state, job.nodes, job.time_limit_s) == ("RUNNING", ("gpu1", "gpu2"), 600)
    assert slurm.signal(job_id, "USR2")
    assert fake.signals == [(1, "USR2")]
    slurm.requeue(job_id)
    assert (slurm.job(job_id).state, slurm.job(job_id).restarts) == ("PENDING", 1)
    fake.advance(11)
    slurm.update(job_id, TimeLimit=20)
    assert slurm.job(job_id).time_limit_s == 1200
    slurm.cancel(job_id)
    assert slurm.job(job_id).state == "CANCELLED"
    assert not slurm.signal(job_id, "TERM")
    fake.advance(301)
    assert slurm.job(job_id) is None


def test_held_jobs_are_released(fake, slurm):
    job_id = fake.submit("--hold", "job.sh")
    assert slurm.job(job_id).reason == "JobHeldUser"
    slurm.release(job_id)
    assert slurm.job(job_id).state == "RUNNING"


def test_several_jobs_in_one_call(fake, slurm):
    one, two = fake.submit("-N", "3", "job.sh"), fake.submit("job.sh")
    before = len(fake.argvs)
    found = slurm.jobs([one, two, "99"])
    assert len(fake.argvs) == before + 1
    assert {job_id: job.state for job_id, job in found.items()} == {one: "RUNNING", two: "PENDING"}
    assert slurm.jobs(["99"]) == {}
    assert slurm.jobs([]) == {}


def test_the_cluster(slurm):
    assert [partition.name for partition in slurm.partitions()] == ["low", "high"]
    assert slurm.partitions()[0].gres[0].count == 4
    assert len(slurm.nodes()) == 3
    assert slurm.config()["cred_expire_s"] == 10


UNSET = """sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: fatal: Could not establish a configuration source
"""


@pytest.mark.parametrize(
    ("conf", "found"),
    [
        (None, "find no cluster: SLURM_CONF is not set (fetch_config: DNS SRV lookup failed; Could not establish a"),
        ("/nowhere/slurm.conf", "SLURM_CONF: /nowhere/slurm.conf: there is no such file; set SLURM_CONF to"),
    ],
)
def test_no_cluster_is_told_as_what_it_is(conf: str | None, found: str) -> None:
    slurm = Slurm(Replying(1, UNSET), {} if conf is None else {"SLURM_CONF": conf})
    assert found in str(slurm.why_unavailable())
    with pytest.raises(NotConfiguredError, match="load the site's Slurm module"):
        slurm.jobs(["1"])


def test_available(fake, slurm):
    assert slurm.available()
    fake.away = True
    assert slurm.available()  # Slurm is there, only its controller is not
    fake.installed = False
    assert not slurm.available()
    with pytest.raises(CommandError, match="scontrol: not found on the path"):
        slurm.job("1")


def test_the_environment_of_clients(fake):
    environ = {
        "PATH": "/usr/bin",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURM_JWT": "token",
        "SLURM_CPU_BIND": "cores",
        "SLURM_JOB_ID": "7",
        "SLURM_TIME_FORMAT": "relative",
        "SQUEUE_FORMAT": "%i",
        "SBATCH_PARTITION": "debug",
        "SACCT_FORMAT": "jobid",
        "SCANCEL_INTERACTIVE": "1",
    }
    Slurm(fake, environ).job("1")
    expected = {
        "PATH": "/usr/bin",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURM_JWT": "token",
        "SLURM_TIME_FORMAT": "%s",
    }
    assert fake.envs == [expected]
    assert client_environment(environ) == expected


@pytest.mark.parametrize("job_id", ["", "-u", "--user=anna", "1,2", "all", "1 2", "1_", "$(id)"])
def test_a_job_id_is_no_option(fake, slurm, job_id):
    for act in (slurm.job, slurm.cancel, slurm.requeue, lambda text: slurm.jobs([text])):
        with pytest.raises(InputError, match="allowed: a number"):
            act(job_id)
    assert fake.argvs == []


@pytest.mark.parametrize("name", ["away_job", "away_squeue", "away_cancel", "away_requeue", "away_test"])
def test_a_controller_that_is_away(replying, name):
    slurm = replying(name)
    acts = (
        lambda: slurm.job("4"),
        lambda: slurm.jobs(["4", "5"]),
        slurm.partitions,
        slurm.config,
        lambda: slurm.cancel("4"),
        lambda: slurm.signal("4", "TERM"),
        lambda: slurm.requeue("4"),
        lambda: slurm.test_only(Path("job.sh")),
    )
    for act in acts:
        with pytest.raises(ControllerUnreachableError, match=r"controller is away \(.+\); ask again later"):
            act()


def test_a_controller_that_hangs():
    class Hanging(Replying):
        def run(self, argv, timeout_s=None, env=None):
            assert timeout_s is not None
            raise CommandTimeoutError(f"{argv[0]}: no answer after {timeout_s:g} s")

    slurm = Slurm(Hanging(0, ""), {})
    with pytest.raises(ControllerUnreachableError, match=r"squeue: no answer after 60 s"):
        slurm.jobs(["1"])
    assert not slurm.available()


def test_jobs_that_slurm_does_not_know(replying):
    assert replying("unknown_job").job("99999") is None
    assert replying("unknown_job_squeue").jobs(["99999"]) == {}
    assert replying("unknown_two_squeue").jobs(["99998", "99999"]) == {}
    assert replying("unknown_task", on_stdout=True).job("1_9") is None
    replying("cancel_unknown").cancel("99999")
    replying("cancel_done").cancel("2")
    assert replying("signal_done").signal("2", "USR1") is False


def test_a_task_of_an_array_is_signalled_by_its_steps_and_known_to_srun_by_its_number(fake, slurm):
    """A signal to the task itself is an error while other tasks wait, and scancel repeats it."""
    array = fake.submit("--array=0-3%1", "job.sh")
    fake.advance(1)
    assert slurm.signal(f"{array}_0", "USR2")
    assert fake.argvs[-1] == ("scancel", "--signal=USR2", f"{array}_0.0")
    assert not slurm.signal(f"{array}_1", "USR2"), "it waits"
    assert slurm.number(f"{array}_0") == str(int(array) + 1)
    assert slurm.number(f"{array}_3") == array
    assert slurm.number("7") == "7"


def test_the_known_one_of_two_jobs(captured):
    (section,) = [name for name in captured.sections("replies.txt") if name.startswith("mixed_ids_squeue")]
    text = captured.sections("replies.txt")[section]
    found = Slurm(Replying(0, text, on_stdout=True), {}).jobs(["2", "3", "99999"])
    assert [job.state for job in found.values()] == ["FAILED"]
    assert next(iter(found.values())).exit_code == 3


@pytest.mark.parametrize(
    ("name", "act", "words"),
    [
        ("requeue_pending", lambda slurm: slurm.requeue("8"), "scontrol requeue 8: Job is pending execution for job"),
        ("requeue_unknown", lambda slurm: slurm.requeue("8"), "Invalid job id specified for job 99999"),
        ("update_bad", lambda slurm: slurm.update("8", Nonsense=3), "Update of this parameter is not supported"),
        ("signal_pending", lambda slurm: slurm.signal("8", "USR1"), "Job can not be altered now"),
        ("noconf", lambda slurm: slurm.job("8"), "cannot stat file"),
    ],
)
def test_refusals_keep_slurms_words(replying, name, act, words):
    with pytest.raises(CommandError, match=words) as caught:
        act(replying(name))
    assert not isinstance(caught.value, ControllerUnreachableError)
    assert "\n" not in str(caught.value)


def test_a_start_estimate(captured, replying):
    estimate = replying("test_ok").test_only(Path("job.sh"))
    assert (estimate.nodes, estimate.problem) == (("gpu1", "gpu2"), None)
    assert 1795229000 < estimate.start_s < 1795230000
    # A limit that keeps a job from ever starting is no refusal to sbatch: the start is more than a century away.
    never = replying("test_account").test_only(Path("job.sh"))
    assert never.start_s - estimate.start_s > 100 * 365 * 86400


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "test_partition",
            "invalid partition specified: nope; allocation failure: Invalid partition name specified",
        ),
        ("test_nodes", "allocation failure: Requested node configuration is not available"),
        ("test_bad_time", "Invalid --time specification"),
    ],
)
def test_why_sbatch_refuses(replying, name, problem):
    assert replying(name).test_only(Path("job.sh")) == StartEstimate(None, (), problem)


def test_a_script_is_tested_not_submitted(fake, slurm, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun true\n")
    assert slurm.test_only(script) == StartEstimate(fake.now, ("gpu1", "gpu2"), None)
    assert "configuration is not available" in slurm.test_only(script, ["--nodes=9"]).problem
    assert fake.jobs == {}


def test_the_fake_prints_what_the_real_one_prints(captured):
    """Every field of the fake's text is one that the real client prints, in the same order."""
    fake = FakeSlurm()
    job_id = fake.submit("-N", "2", "job.sh")
    for argv, real in (
        (["scontrol", "show", "job", "-o", job_id], captured.sections("jobs.txt")["before_preempt"]),
        (["scontrol", "show", "node", "-o"], captured.sections("nodes.txt")["idle"]),
        (["scontrol", "show", "partition", "-o"], captured.text("partitions.txt")),
    ):
        made = _keys(fake.run(argv).stdout.splitlines()[0])
        known = [key for key in _keys(real.splitlines()[0]) if key in made]
        assert made == known, argv
    settings = {line.split("=")[0].strip() for line in captured.text("config.txt").splitlines() if "=" in line}
    fakes = {line.split("=")[0].strip() for line in fake.run(["scontrol", "show", "config"]).stdout.splitlines()[1:]}
    assert fakes <= settings


def _keys(line: str) -> list[str]:
    return [word.split("=")[0] for word in line.split() if "=" in word]


def test_the_fakes_two_commands_agree(fake, slurm):
    ids = [fake.submit("-N", "2", "job.sh"), fake.submit("-N", "2", "--no-requeue", "job.sh"), fake.submit("job.sh")]
    fake.fail_node("gpu1")
    fake.advance(11)
    fake.finish(ids[2], code=3)
    for job_id in ids:
        by_scontrol = parse_scontrol_job(fake.run(["scontrol", "show", "job", "-o", job_id]).stdout)
        assert by_scontrol == [slurm.jobs([job_id])[job_id]]
    assert slurm.jobs(ids)[ids[2]].exit_code == 3
    assert parse_squeue("") == []


@pytest.mark.slow
def test_the_runner_keeps_to_environment_and_time(tmp_path):
    runner = SystemRunner()
    show = "import os, sys; print(sorted(os.environ), sys.stdin.read(), chr(0xDCFF))"
    done = runner.run([sys.executable, "-c", show], timeout_s=30, env={"PYTHONIOENCODING": "utf-8:surrogateescape"})
    assert "'PYTHONIOENCODING'" in done.stdout
    assert "'PATH'" not in done.stdout
    assert "\N{REPLACEMENT CHARACTER}" in done.stdout  # a byte that is no UTF-8
    with pytest.raises(CommandTimeoutError, match=r"no answer after 0.2 s"):
        runner.run([sys.executable, "-c", "import time; time.sleep(30)"], timeout_s=0.2)
