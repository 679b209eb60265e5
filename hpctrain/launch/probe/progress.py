"""The request to a probe, and watching the probe from outside: its progress, its end, the last line of its log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError
from hpctrain.base.json_text import parse_json
from hpctrain.base.process import Process

POLL_S = 0.1
STALL_S = 90.0
"""Seconds without progress after which a probe is given up. The first node watches the others, so it must hang
itself."""

FINAL_WAIT_S = 3.0
"""Seconds that the nodes get to end by themselves once the result is written."""

Progress = Callable[[str, int, int], None]
"""Function that is called with (phase, done, planned) at each change; the phases are join, links and devices."""


@dataclass(frozen=True)
class ProbeRequest:
    """The settings of a probe."""

    device: str = "auto"
    """Devices to measure: auto, cpu, cuda, or none to measure links only."""
    seed: int = 0
    """Seed of the order of the rounds."""
    mode: str = "full"
    """Mode of the probe: health, full or sampled."""
    prior: Path | None = None
    """File with a topology that says which nodes share a switch, on a file system that the nodes share; None: no
    prior."""

    @property
    def options(self) -> list[str]:
        """Return the request as options of `hpctrain.node probe`."""
        prior = ["--prior", str(self.prior.resolve())] if self.prior is not None else []
        return [*prior, "--device", self.device, "--seed", str(self.seed), "--mode", self.mode]


DEFAULTS = ProbeRequest()


def watch_probe(
    process: Process, folder: Path, clock: Clock, progress: Progress, queued: bool = False, result: Path | None = None
) -> None:
    """Wait until `process` has ended, and report progress.

    Args:
        process: the probe's first node, or the job that holds all of them.
        queued: the probe may first have to wait for its nodes in the queue, without limit.
        result: the file that the first node writes last; once it exists, the process gets FINAL_WAIT_S to end.

    Raises:
        HpctrainError: the probe makes no progress for STALL_S.
    """
    seen: tuple[str, int, int] | None = None
    since = clock.now()
    written: float | None = None
    while process.poll() is None:
        if written is None and result is not None and result.exists():
            written = clock.now()
        if written is not None and clock.now() - written > FINAL_WAIT_S:
            return
        waiting = queued and seen is None
        if not waiting and clock.now() - since > STALL_S:
            raise HpctrainError(f"probe: the first node got no further in {STALL_S:g} s (last: {seen}); try again")
        now = _progress(folder)
        if now is not None and now != seen:
            progress(*now)
            seen, since = now, clock.now()
        clock.sleep(POLL_S)


def raise_probe_error(process: Process, log: Path) -> None:
    """Check that the process ended with exit code 0.

    Raises:
        HpctrainError: it ended with another code; the message has the last line of the log.
    """
    code = process.poll()
    if code == 0:
        return
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    last = lines[-1] if lines else "it printed nothing"
    raise HpctrainError(f"probe: it ended with code {code}: {last}")


def no_progress(phase: str, done: int, planned: int) -> None:
    """Ignore the progress."""


def _progress(folder: Path) -> tuple[str, int, int] | None:
    try:
        value = parse_json((folder / "progress.json").read_text())
    except (OSError, ValueError):
        return None  # not written yet
    return str(value["phase"]), int(value["done"]), int(value["planned"])
