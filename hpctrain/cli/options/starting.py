"""Options of the commands that start a run: `--profile STEP` and `--seeds 0-4`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from hpctrain.base.errors import InputError
from hpctrain.records.run.run import Run

profile_option = click.option(
    "--profile", "profile", type=click.IntRange(min=1), metavar="STEP",
    help="Record this step with torch's profiler: one trace a rank, in profile/ of the run folder.",
)  # fmt: skip


def with_profile(overrides: tuple[str, ...], step: int | None) -> tuple[str, ...]:
    """Return the overrides (`--set KEY=VALUE`) with `profile.step` set to `step`; unchanged if `step` is None."""
    return overrides if step is None else (*overrides, f"profile.step={step}")


def traces_line(run: Run, folder: Path) -> str | None:
    """Return a line with the paths of the run's profiler traces and the programs that open them.

    None if the run traces no step. If no trace exists, the line says so.
    """
    step = run.profile.step
    if step is None:
        return None
    pattern = f"step-{step}.rank-*.json.gz"
    count = len(list((folder / "profile").glob(pattern)))
    if not count:
        return f"profile: step {step} was not reached, or no trace could be written (the workers' logs say why)"
    what = "1 trace" if count == 1 else f"{count} traces"
    return (
        f"profile: {what} of step {step}: {folder}/profile/{pattern}; open them at ui.perfetto.dev or chrome://tracing"
    )


MOST = 200
NAME_LENGTH = 64
"""Longest name of a run, in characters, as the run file's `name` allows."""

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18})(?:/([1-9]\d{0,8}))?)?", re.ASCII)

seeds_option = click.option("--seeds", metavar="SET", help="One run for each of these seeds: 0-4, or 1,2,5, or 0-20/5.")


def parse_seeds(text: str) -> list[int]:
    """Return the seeds that a text names, ascending and each once: '7,0-2' -> [0, 1, 2, 7], '0-20/5' -> every fifth.

    Raises:
        InputError: the text is wrong, or names too many seeds.
    """
    matches = [_RANGE.fullmatch(item.strip()) for item in text.split(",")]
    # Count the seeds of ranges before any list is made: a range costs nothing, however long it is.
    ranges = [range(int(m[1]), int(m[2] or m[1]) + 1, int(m[3] or 1)) for m in matches if m]
    if len(ranges) < len(matches) or not all(ranges):
        raise InputError(f"--seeds: found {text!r}; allowed: numbers and ranges, as 0-4 or 1,2,5 or 0-20/5")
    if sum(len(item) for item in ranges) > MOST:
        raise InputError(f"--seeds: found {text!r}; allowed: up to {MOST} seeds, each is a job of its own")
    return sorted({seed for item in ranges for seed in item})


def with_seed(run: Run, seed: int) -> Run:
    """Return the run with another seed, and with `-seed<seed>` at the end of its name.

    Raises:
        InputError: the name becomes too long.
    """
    name = f"{run.name}-seed{seed}"
    if len(name) > NAME_LENGTH:
        raise InputError(f"--seeds: {name} is longer than {NAME_LENGTH} characters; give the run a shorter name")
    return run.model_copy(update={"name": name, "seed": seed})
