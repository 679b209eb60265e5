"""Processes of a bench that run together: if one fails, all of them end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.base.errors import CommandError
from hpctrain.base.process import Process, Runner, end_process

PAUSE_S = 0.2
LAST_LINES = 3
"""Number of lines at the end of a failed process's log that the error message shows."""


def run_together(
    runner: Runner, bench: str, commands: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str]
) -> None:
    """Start a process for each command, and wait until all have ended. No process outlives this call.

    Args:
        bench: name of the bench, for the error message.
        folder: the log of process n is written here as rank<n>.log.
        environment: environment variables of all processes.

    Raises:
        CommandError: a process failed; the message has the end of its log.
    """
    logs = [folder / f"rank{rank}.log" for rank in range(len(commands))]
    processes: list[Process] = []
    try:
        for argv, log in zip(commands, logs, strict=True):
            processes.append(runner.start(argv, env=dict(environment), log=log))
        _wait(bench, processes, logs)
    finally:
        for process in processes:
            end_process(process)


def _wait(bench: str, processes: Sequence[Process], logs: Sequence[Path]) -> None:
    while True:
        codes = [process.poll() for process in processes]
        for code, log in zip(codes, logs, strict=True):
            if code not in (None, 0):
                last_lines = log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
                words = " ".join(" ".join(last_lines).split()) or "it said nothing"
                raise CommandError(f"{bench}: a process ended with {code}: {words}")
        if all(code == 0 for code in codes):
            return
        time.sleep(PAUSE_S)
