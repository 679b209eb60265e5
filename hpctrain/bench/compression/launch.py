"""Start and stop the processes of one launch, on this machine or in the network namespaces of a lab."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.errors import CommandError
from hpctrain.base.module_argv import program
from hpctrain.base.process import Process, Runner, end_process
from hpctrain.bench.compression.launch_files import LaunchResult, LaunchSpec

PAUSE_S = 0.2
LAST_LINES = 3
"""Lines of a failed process's log that the error message shows."""


def run_scene(runner: Runner, scene: LaunchSpec, folder: Path, prefixes: Sequence[Sequence[str]]) -> LaunchResult:
    """Start a process for each of `prefixes`, wait for all, and return what they measured.

    When one fails, the others are killed, because they would wait for it forever. No process outlives this call.

    Args:
        folder: holds the corpus; the launch file, samples, logs and the rendezvous file are written there.
        prefixes: for each rank the words before the command, which enter its namespace; may be empty.

    Raises:
        CommandError: a process failed; the message has the end of its log.
    """
    (folder / "meeting").unlink(missing_ok=True)
    scene.write(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [folder / f"rank{rank}.log" for rank in range(scene.nodes)]
    processes: list[Process] = []
    try:
        for rank, (prefix, log) in enumerate(zip(prefixes, logs, strict=True)):
            argv = [*prefix, *program("hpctrain.bench.compression.rank"), str(folder), str(rank)]
            processes.append(runner.start(argv, env=environment, log=log))
        _wait(processes, logs)
    finally:
        for process in processes:
            end_process(process)
    return LaunchResult.read(folder)


def _wait(processes: Sequence[Process], logs: Sequence[Path]) -> None:
    while True:
        codes = [process.poll() for process in processes]
        for code, log in zip(codes, logs, strict=True):
            if code not in (None, 0):
                last_lines = log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
                words = " ".join(" ".join(last_lines).split()) or "it said nothing"
                raise CommandError(f"bench compression: a process ended with {code}: {words}")
        if all(code == 0 for code in codes):
            return
        time.sleep(PAUSE_S)
