"""The option `--profile STEP` of the commands that start a run."""

from __future__ import annotations

from pathlib import Path

import click

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
