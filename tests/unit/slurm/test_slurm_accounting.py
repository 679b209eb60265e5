"""sacct: the question, and its answer in the format that its manual page describes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import CommandError
from hpctrain.slurm.job import parse_sacct, sacct_argv
from hpctrain.slurm.values import SEPARATOR


def answer(*lines: str) -> str:
    return "".join(line.replace("|", SEPARATOR) + "\n" for line in lines)


TIMEOUT = "7|TIMEOUT|0:15|gpu[1-2]|100|200|300|01:00:00|low|None"


def test_the_question_leaves_nothing_to_settings():
    argv = sacct_argv(["7", "9"])
    assert argv[0] == "sacct"
    assert {"--parsable2", "--noheader", "--duplicates", "--allocations", "--jobs=7,9"} < set(argv)
    assert any(word.startswith("--format=JobID,State,ExitCode,") for word in argv)


def test_a_job_that_ran_out_of_time():
    job = parse_sacct(answer(TIMEOUT))["7"]
    assert (job.state, job.exit_code) == ("TIMEOUT", 0)
    assert (job.nodes, job.submit_s, job.start_s, job.end_s) == (("gpu1", "gpu2"), 100, 200, 300)
    assert (job.time_limit_s, job.partition, job.restarts) == (3600, "low", 0)


def test_a_cancelled_job_that_never_started():
    (job,) = parse_sacct(answer("8|CANCELLED by 1000|0:0|None assigned|100|None|200|UNLIMITED|low|Priority")).values()
    assert (job.state, job.nodes, job.start_s) == ("CANCELLED", (), None)


def test_of_a_requeued_job_the_last_time_counts():
    lines = answer("7|NODE_FAIL|1:0|gpu1|100|100|150|10|low|None", TIMEOUT.replace("|100|", "|160|"))
    job = parse_sacct(lines)["7"]
    assert (job.state, job.restarts) == ("TIMEOUT", 1)


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "REQUEUED", "", "SOMETHING_NEW"])
def test_what_is_not_over_is_not_told(state):
    assert parse_sacct(answer(TIMEOUT.replace("TIMEOUT", state))) == {}


def test_an_answer_of_another_form_is_refused():
    with pytest.raises(CommandError, match="sacct: 1 fields in its answer"):
        parse_sacct("7 TIMEOUT\n")


@given(st.text(st.characters(exclude_characters=SEPARATOR + "\n\r", exclude_categories=["Cs", "Zl", "Zp", "Cc"])))
def test_any_reason_is_read(reason):
    job = parse_sacct(answer(TIMEOUT.removesuffix("None")).removesuffix("\n") + reason + "\n")["7"]
    assert job.state == "TIMEOUT"


@pytest.mark.parametrize("text", [None, "no such thing\n"])
def test_without_accounting_nothing_is_told_and_nothing_is_wrong(fake, slurm, text):
    fake.accounting = text
    assert slurm.ended_jobs(["7"]) == {}
    assert slurm.ended_jobs([]) == {}
    fake.installed = False
    assert slurm.ended_jobs(["7"]) == {}


def test_a_forgotten_job_is_remembered(fake, slurm):
    fake.accounting = answer(TIMEOUT)
    assert slurm.ended_jobs(["7"])["7"].state == "TIMEOUT"
