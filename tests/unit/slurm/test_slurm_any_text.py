"""Whatever Slurm prints, a parser reads it or says in the house's words that it cannot: nothing else comes out."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.base.errors import CommandError, HpctrainError
from hpctrain.base.process import CommandResult
from hpctrain.lab import status
from hpctrain.slurm.cluster import has_features, parse_config, parse_gres, parse_nodes, parse_partitions
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.job import JobInfo, needs_action, parse_sacct, parse_scontrol_job, parse_squeue, pending_job_text
from hpctrain.slurm.values import SEPARATOR, node_names, number, read_duration, read_moment

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "slurm"
SACCT = SEPARATOR.join(
    ["7", "CANCELLED by 0", "0:15", "gpu[1-2]", "1795228877", "Unknown", "None", "1-00:00:00", "low", "None"]
)
REAL = sorted({line for path in GOLDEN.glob("*/*.txt") for line in path.read_text().split("\n") if line} | {SACCT})
"""Every line that either version was seen to print, and one of sacct, which no captured cluster had."""

TEXT_PARSERS: list[Callable[[str], object]] = [
    parse_scontrol_job, parse_squeue, parse_nodes, parse_partitions, parse_config, parse_sacct,
    status.parse_nodes, status.parse_jobs,
]  # fmt: skip
VALUE_PARSERS: list[Callable[[str], object]] = [
    number, node_names, parse_gres, read_moment, read_duration, lambda text: has_features(text, {"a100"}),
]  # fmt: skip

ODD = st.sampled_from(
    ["²", "٣", "9" * 5000, "-", "[", "]", "[1-", "[5-1]", "[1-999999999]", "[0-9,x]", "x[1-2]y[3-4]", ":", "::", "=",
     " ", "\t", "\x00", "\x1f", "\x85", "\u2028", "\r", "(null)", "N/A", "UNLIMITED", "0001-01-01T00:00:00",
     "9999-12-31T23:59:59+00:00", "-1", "1-", "1e400", "nan", "inf", "%", "@", "!", "^", "&", ",", ",,", "a" * 300]
)  # fmt: skip
VALUE = re.compile(r"(?<=[=\x1f])[^ \x1f]+")
FRAGMENT = st.one_of(ODD, st.text(max_size=12))


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A line that Slurm did print, with pieces of it lost, repeated or replaced."""
    line = draw(st.sampled_from(REAL))
    for _ in range(draw(st.integers(0, 3))):
        # A value as a whole, where it counts most.
        value = draw(st.sampled_from([*VALUE.finditer(line)] or [None]))
        if value is not None:
            line = line[: value.start()] + draw(FRAGMENT) + line[value.end() :]
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, len(line)))
        end = draw(st.integers(start, min(len(line), start + 40)))
        line = line[:start] + draw(st.one_of(st.just(""), st.just(2 * line[start:end]), FRAGMENT)) + line[end:]
    return line


def read(parser: Callable[[str], object], text: str) -> object:
    """What the parser makes of it; None where it refuses it as it should."""
    try:
        return parser(text)
    except CommandError:
        return None


@settings(max_examples=150)
@given(st.lists(st.one_of(damaged(), damaged(), st.text(max_size=60)), min_size=1, max_size=3).map("\n".join))
def test_no_text_is_too_odd_for_a_parser(text: str) -> None:
    for parser in TEXT_PARSERS:
        found = read(parser, text)
        values = found.values() if isinstance(found, Mapping) else found if isinstance(found, Sequence) else ()
        for job in values:
            if isinstance(job, JobInfo):
                assert_can_be_shown(job)


def assert_can_be_shown(job: JobInfo) -> None:
    moments = (job.submit_s, job.begin_s, job.start_s, job.end_s, job.preempt_s)
    assert all(moment is None or math.isfinite(moment) for moment in moments)
    assert isinstance(pending_job_text(job), str)
    assert isinstance(pending_job_text(job, now=1.8e9), str)
    needs_action(job)


@settings(max_examples=200)
@given(st.lists(FRAGMENT, max_size=4).map("".join))
def test_no_value_is_too_odd_for_a_parser(text: str) -> None:
    for parser in VALUE_PARSERS:
        read(parser, text)


class Says:
    """A runner whose every command ends with the same words."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self._said = code, stdout, stderr

    def run(
        self, argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        return CommandResult(tuple(argv), *self._said)


ASKED: list[Callable[[Slurm], object]] = [
    lambda slurm: slurm.job("7"),
    lambda slurm: slurm.jobs(["7", "8"]),
    lambda slurm: slurm.ended_jobs(["7"]),
    lambda slurm: slurm.state(),
    lambda slurm: slurm.requeue("7"),
    lambda slurm: slurm.signal("7", "TERM"),
    lambda slurm: slurm.submit(Path("job.sh")),
    lambda slurm: slurm.test_only(Path("job.sh")),
    lambda slurm: slurm.queued_behind(Path("job.sh"), "7"),
]


@settings(max_examples=100)
@given(st.sampled_from((0, 1, 255)), damaged(), damaged())
def test_no_answer_of_a_command_is_a_crash(code: int, stdout: str, stderr: str) -> None:
    for ask in ASKED:
        with contextlib.suppress(HpctrainError):
            ask(Slurm(Says(code, stdout, stderr), {}))


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5"])
@pytest.mark.parametrize(
    ("file", "parser", "at_least"),
    [("jobs.txt", parse_scontrol_job, 30), ("squeue.txt", parse_squeue, 30), ("nodes.txt", parse_nodes, 10),
     ("nodes.txt", status.parse_nodes, 4), ("partitions.txt", parse_partitions, 4)],
)  # fmt: skip
def test_the_lines_it_is_damaged_from_are_read(version: str, file: str, parser, at_least: int) -> None:
    lines = [line for line in (GOLDEN / version / file).read_text().split("\n") if not line.startswith("== ")]
    assert len(parser("\n".join(lines))) >= at_least
