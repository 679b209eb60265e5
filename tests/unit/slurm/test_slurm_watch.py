"""The watcher: one call for all jobs, rarer and rarer, and patience with a controller that is away."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import CommandError
from hpctrain.slurm.watch import DELAY_MAX_S, DELAY_MIN_S, JobWatcher, next_delay


def run_for(watcher, fake, seconds, now=0.0):
    """Poll every second of `seconds`; the moments of a change, and those at which Slurm was asked."""
    changed, asked = [], []
    for _ in range(seconds):
        before = len(fake.argvs)
        changed += [now] * watcher.poll(now)
        asked += [now] * (len(fake.argvs) - before)
        now += 1.0
        fake.advance(1)
    return changed, asked


def test_calls_become_rarer_up_to_30_s(fake, slurm):
    watcher = JobWatcher(slurm, [fake.submit("job.sh"), fake.submit("job.sh")])
    changed, asked = run_for(watcher, fake, 120)
    assert changed == [0]
    assert [job.state for job in watcher.known.values()] == ["RUNNING"] * 2
    assert asked == [0, 1, 3, 7, 15, 31, 61, 91]
    assert all(argv[0] == "squeue" for argv in fake.argvs[-8:])


def test_a_change_is_told_once_and_brings_the_delay_back(fake, slurm):
    job_id = fake.submit("-N", "2", "job.sh")
    watcher = JobWatcher(slurm, [job_id])
    run_for(watcher, fake, 40)
    assert watcher.delay_s == DELAY_MAX_S
    fake.preempt(job_id)
    assert watcher.known[job_id].state == "RUNNING"
    assert watcher.poll(61.0)
    assert (watcher.known[job_id].state, watcher.known[job_id].restarts) == ("PENDING", 1)
    assert watcher.delay_s == DELAY_MIN_S
    assert not watcher.poll(62.0)
    fake.advance(11)
    assert watcher.poll(64.0)
    assert watcher.known[job_id].nodes == ("gpu1", "gpu2")


def test_a_command_that_watches_asks_at_most_every_ten_seconds(fake, slurm):
    job_id = fake.submit("job.sh")
    watcher = JobWatcher(slurm, [job_id], delay_min_s=10)
    _, asked = run_for(watcher, fake, 65)
    assert asked == [0, 10, 30, 60]
    watcher.poll_soon()
    assert watcher.next_s == 70
    fake.advance(400)
    fake.finish(job_id)
    assert watcher.poll(70)
    assert watcher.known[job_id].state == "COMPLETED"
    assert watcher.next_s == 80
    assert not watcher.is_forgotten(job_id)
    fake.advance(301)
    watcher.poll(80)
    assert watcher.is_forgotten(job_id)


def test_an_answer_that_cannot_be_read_is_not_asked_for_again_at_once(fake, slurm, monkeypatch):
    watcher = JobWatcher(slurm, [fake.submit("job.sh")])
    monkeypatch.setattr(fake, "_squeue", lambda argv: fake._reply(argv, "no fields\n"))
    with pytest.raises(CommandError):
        watcher.poll(0.0)
    before = len(fake.argvs)
    assert not watcher.poll(1.0)
    assert len(fake.argvs) == before


def test_moving_estimates_are_no_change(fake, slurm):
    fake.submit("-N", "3", "job.sh")
    waiting = fake.submit("job.sh")
    watcher = JobWatcher(slurm, [waiting])
    assert watcher.poll(0.0)
    fake.jobs[int(waiting)] = replace(fake.jobs[int(waiting)], start_s=fake.now)
    assert not watcher.poll(100.0)
    assert watcher.known[waiting].start_s == fake.now


def test_a_controller_that_is_away_changes_nothing_that_is_known(fake, slurm):
    job_id = fake.submit("job.sh")
    watcher = JobWatcher(slurm, [job_id])
    watcher.poll(0.0)
    known = dict(watcher.known)
    fake.away = True
    assert not watcher.poll(5.0)
    assert not watcher.poll(50.0)
    assert "controller is away" in watcher.away
    assert watcher.away_since_s == 5.0
    assert watcher.known == known
    assert not watcher.all_ended
    fake.away = False
    assert not watcher.poll(100.0)
    assert (watcher.away, watcher.away_since_s, watcher.delay_s) == (None, None, DELAY_MIN_S)


def test_away_calls_become_rarer_too(fake, slurm):
    watcher = JobWatcher(slurm, [fake.submit("job.sh")])
    fake.away = True
    _, asked = run_for(watcher, fake, 100)
    assert asked == [0, 2, 6, 14, 30, 60, 90]


def test_the_end(fake, slurm):
    one, two = fake.submit("job.sh"), fake.submit("--no-requeue", "job.sh")
    watcher = JobWatcher(slurm, [one, two])
    watcher.poll(0.0)
    fake.finish(one)
    watcher.poll(10.0)
    assert not watcher.all_ended
    fake.fail_node(watcher.known[two].nodes[0])
    assert watcher.poll(20.0)
    assert watcher.known[two].state == "NODE_FAIL"
    assert watcher.all_ended


def test_forgotten_jobs_keep_their_last_state(fake, slurm):
    one, two = fake.submit("job.sh"), fake.submit("job.sh")
    watcher = JobWatcher(slurm, [one, two])
    watcher.poll(0.0)
    fake.finish(one)
    watcher.poll(10.0)
    fake.advance(301)
    assert watcher.poll(311.0)
    assert (watcher.is_forgotten(one), watcher.is_forgotten(two)) == (True, False)
    assert watcher.known[one].state == "COMPLETED"
    fake.argvs.clear()
    watcher.poll(400.0)
    assert two in fake.argvs[0]  # the forgotten one is not asked for again


def test_jobs_come_later(fake, slurm):
    watcher = JobWatcher(slurm)
    assert not watcher.poll(0.0)
    assert fake.argvs == []
    job_id = fake.submit("job.sh")
    watcher.add(job_id)
    assert watcher.poll(0.5)
    assert list(watcher.known) == [job_id]


@given(st.floats(DELAY_MIN_S, DELAY_MAX_S), st.booleans())
def test_the_delay_stays_in_its_bounds(delay, changed):
    following = next_delay(delay, changed)
    assert DELAY_MIN_S <= following <= DELAY_MAX_S
    assert following == DELAY_MIN_S if changed else following >= delay
