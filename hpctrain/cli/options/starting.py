"""The option `--profile STEP` of the commands that start a run, the line about the traces that it made, and readers of
whole numbers and seeds."""

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

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18})(?:/([1-9]\d{0,8}))?)?", re.ASCII)


def parse_range(text: str) -> range | None:
    """Return the whole numbers that a text names: '7', '0-4', or '0-20/5' for every fifth; empty if the range ends
    before it begins. None for a text of another form."""
    match = _RANGE.fullmatch(text)
    return range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1)) if match else None


def parse_seeds(text: str) -> list[int]:
    """Return the seeds that a text names, ascending and each once: '7,0-2' -> [0, 1, 2, 7], '0-20/5' -> every fifth.

    Raises:
        InputError: the text is wrong, or names more than `MOST` seeds.
    """
    # Count the seeds of ranges before any list is made: a range costs nothing, however long it is.
    ranges = [numbers for item in text.split(",") if (numbers := parse_range(item.strip()))]
    if len(ranges) < text.count(",") + 1:
        raise InputError(f"--seeds: found {text!r}; allowed: numbers and ranges, as 0-4 or 1,2,5 or 0-20/5")
    if sum(len(item) for item in ranges) > MOST:
        raise InputError(f"--seeds: found {text!r}; allowed: up to {MOST} seeds")
    return sorted({seed for item in ranges for seed in item})
