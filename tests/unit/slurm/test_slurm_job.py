"""Jobs read from captured output: every situation, from both commands, in both versions."""

from __future__ import annotations

import re
import time

import pytest

from hpctrain.base.errors import CommandError
from hpctrain.slurm.job import (
    SEPARATOR,
    needs_action,
    parse_scontrol_job,
    parse_squeue,
    parse_state,
    pending_job_text,
)

STATES = {
    "running": "RUNNING",
    "suspended": "SUSPENDED",
    "completing": "COMPLETING",
    "pending_resources": "PENDING",
    "requeued": "PENDING",
    "preempt_grace": "RUNNING",
    "preempted_requeue": "PENDING",
    "preempted_norequeue": "PREEMPTED",
    "node_fail": "NODE_FAIL",
    "node_fail_requeued": "PENDING",
    "completed": "COMPLETED",
    "failed": "FAILED",
    "timeout": "TIMEOUT",
    "cancelled": "CANCELLED",
    "cancelled_pending": "CANCELLED",
}
MOVING = ("requeue_at_once", "completing", "configuring")
"""Situations that pass so fast that the second command saw the next."""


@pytest.fixture
def jobs(captured):
    """Situation -> the job as scontrol shows it."""
    found = {name: parse_scontrol_job(text) for name, text in captured.sections("jobs.txt").items()}
    return {name: several[0] for name, several in found.items()}


def test_states(jobs):
    assert {name: jobs[name].state for name in STATES} == STATES


def test_both_commands_tell_the_same(captured):
    by_squeue = captured.sections("squeue.txt")
    compared = 0
    for name, text in captured.sections("jobs.txt").items():
        if name in MOVING:
            continue
        one = {job.job_id: job for job in parse_scontrol_job(text)}
        other = {job.job_id: job for job in parse_squeue(by_squeue[name])}
        assert one.keys() == other.keys(), name
        for job_id, job in one.items():
            different = {
                field: (value, getattr(other[job_id], field))
                for field, value in vars(job).items()
                if field not in ("reason", "batch_host", "shares_nodes") and value != getattr(other[job_id], field)
            }
            assert not different, name
            # scontrol adds the node that failed.
            assert job.reason.split()[:1] == other[job_id].reason.split()[:1], name
            compared += 1
    assert compared > 25


def test_a_running_job_in_full(captured, jobs):
    job = jobs["running"]
    assert job.nodes in (("gpu1", "gpu2"), ("gpu2", "gpu3"))
    assert job.batch_host == job.nodes[0]
    assert (job.partition, job.time_limit_s, job.restarts, job.reason) == ("low", 1800, 0, "")
    assert job.start_s is not None
    assert job.end_s == job.start_s + 1800
    assert job.preempt_s is None
    assert job.exit_code is None
    assert 0 <= job.start_s - job.submit_s < 10


def test_local_times_are_read_too(captured, jobs, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        (job,) = parse_scontrol_job(captured.text("job_iso_times.txt"))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert job == jobs["running"]


def test_how_jobs_end(jobs):
    assert jobs["completed"].exit_code == 0
    assert (jobs["failed"].exit_code, jobs["failed"].reason) == (3, "NonZeroExitCode")
    assert jobs["timeout"].end_s - jobs["timeout"].start_s >= 60
    assert jobs["node_fail"].reason.startswith("NodeDown")
    assert all(jobs[name].is_ended for name in ("completed", "failed", "timeout", "node_fail", "cancelled"))


def test_a_requeued_job_waits_with_a_pause(jobs):
    for name in ("requeued", "preempted_requeue", "node_fail_requeued"):
        job = jobs[name]
        assert job.is_waiting, name
        assert not job.is_ended, name
        assert (job.restarts, job.nodes, job.reason, job.exit_code) == (1, (), "BeginTime", None), name
        # cred_expire=10 and a second
        assert job.begin_s - job.submit_s == 11, name


def test_a_preempted_job_says_since_when(jobs):
    job = jobs["preempt_grace"]
    assert job.end_s - job.preempt_s == 8  # the partition's GraceTime
    assert jobs["before_preempt"].preempt_s is None


def test_text_of_people_is_not_read_as_fields(jobs):
    job = jobs["odd_name"]
    assert (job.state, job.reason, job.restarts) == ("PENDING", "JobHeldUser", 0)


def test_which_jobs_share_their_nodes(captured):
    for text in captured.sections("jobs.txt").values():
        lines = [line for line in text.splitlines() if line.startswith("JobId=")]
        for line, job in zip(lines, parse_scontrol_job(text), strict=True):
            assert job.shares_nodes is ("OverSubscribe=OK" in line)
    without = re.sub(r" OverSubscribe=\S+", "", captured.sections("jobs.txt")["array"])
    assert {job.shares_nodes for job in parse_scontrol_job(without)} == {None}


def test_an_array_has_several_jobs(captured):
    waiting, *running = parse_scontrol_job(captured.sections("jobs.txt")["array"])
    assert (waiting.job_id, waiting.state, waiting.reason) == ("1_[2-4%2]", "PENDING", "JobArrayTaskLimit")
    assert {job.job_id: (job.state, len(job.nodes)) for job in running} == {
        "1_0": ("RUNNING", 1),
        "1_1": ("RUNNING", 1),
    }


def test_a_task_of_an_array_is_a_job_of_its_own(captured):
    """The last task has the number of the array for Slurm itself: only the id that squeue shows is unique."""
    tasks = parse_scontrol_job(captured.sections("jobs.txt")["array_tasks"])
    assert [(job.job_id, job.state, job.restarts) for job in tasks] == [
        ("1_0", "PENDING", 1), ("1_1", "CANCELLED", 0), ("1_2", "RUNNING", 0), ("1_3", "RUNNING", 0),
        ("1_4", "PENDING", 0),
    ]  # fmt: skip
    assert "JobId=1 ArrayJobId=1 ArrayTaskId=4 " in captured.sections("jobs.txt")["array_tasks"]


@pytest.mark.parametrize(
    ("name", "words", "stuck"),
    [
        ("pending_resources", "enough free nodes are missing; fewer nodes", False),
        ("pending_priority", "other jobs come first; it gets its turn", False),
        ("pending_dependency", "waits for another job", False),
        ("pending_never", "never starts; cancel it", True),
        ("pending_time_limit", "lower cluster.time", True),
        ("pending_node_limit", "lower cluster.nodes", True),
        ("pending_partition_down", "the partition is down", False),
        ("held", "scontrol release", True),
        ("held_admin", "the site holds it", True),
        ("requeue_hold", "scontrol release", True),
        ("array", "as many tasks", False),
    ],
)
def test_words_for_waiting_jobs(jobs, name, words, stuck):
    assert words in pending_job_text(jobs[name])
    assert needs_action(jobs[name]) is stuck


def test_words_of_held_jobs_hold_the_command(captured):
    sections = captured.sections("jobs.txt")
    (job,) = parse_scontrol_job(sections["launch_failed"])
    assert f"scontrol release {job.job_id}" in pending_job_text(job)
    assert needs_action(job)


def test_words_for_nodes_that_are_away(captured, jobs):
    words = pending_job_text(jobs["pending_node_unavailable"])
    expected = "drained or reserved: mig1" if captured.version == "22.05.8" else "May be reserved for other job"
    assert expected in words
    assert not needs_action(jobs["pending_node_unavailable"])


def test_words_for_a_pause_tell_how_long(jobs):
    job = jobs["pending_begin"]
    assert pending_job_text(job, now=job.begin_s - 3600) == "it may start in 1 h 0 min (BeginTime)"
    assert pending_job_text(job).startswith("it may start from 2026-11-2")
    requeued = jobs["requeued"]
    assert "back into the queue and pauses; it may start in 7 s" in pending_job_text(requeued, now=requeued.begin_s - 7)
    assert "the scheduler's next round" in pending_job_text(requeued, now=requeued.begin_s + 1)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("RUNNING", "RUNNING"),
        ("CANCELLED by 1000", "CANCELLED"),
        ("COMPLETED+", "COMPLETED"),
        ("A_NEW_ONE", "UNKNOWN"),
        ("", "UNKNOWN"),
    ],
)
def test_states_as_any_command_prints_them(text, state):
    assert parse_state(text) is state


def test_no_jobs_are_no_jobs():
    assert parse_scontrol_job("No jobs in the system\n") == []
    assert parse_squeue("\n") == []


def test_text_that_is_not_slurms_is_refused():
    with pytest.raises(CommandError, match="no field 'JobState'"):
        parse_scontrol_job("JobId=3 JobName=x UserId=a(1) \n")
    with pytest.raises(CommandError, match="2 fields in its answer"):
        parse_squeue(f"3{SEPARATOR}RUNNING\n")
    with pytest.raises(CommandError, match="node list 'gpu"):
        parse_scontrol_job("JobId=3 JobState=RUNNING Reason=None NodeList=gpu[1-2 Partition=low")
