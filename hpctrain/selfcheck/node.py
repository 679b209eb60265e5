"""Runs the selfcheck's paths on one node, each path in processes of its own, so that a failed path does not stop the
others."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.base.errors import HpctrainError
from hpctrain.base.forking import ForkingRunner
from hpctrain.base.process import WORKER, Process, end_process
from hpctrain.base.system.job_share import usable_cpus
from hpctrain.launch.local import NO_GPU, VISIBLE_VARIABLES, local_environment
from hpctrain.launch.small_run import make_corpus, make_run
from hpctrain.launch.worker_request import worker_reply
from hpctrain.probe.system.gpu import driver_version, open_nvml
from hpctrain.probe.system.host import cpu_name
from hpctrain.records.history.selfcheck import SUMMARY_CHARS, CheckOrder, CheckResult, PathResult
from hpctrain.selfcheck.paths import OPTIMIZER, SEQ_LEN, SEQUENCES, SPEC, CheckedPath, LeftOut, paths_of
from hpctrain.selfcheck.recovery import check_recovery

PATH_S = 300.0
"""Time limit of one path in seconds: compiling takes the longest."""
POLL_S = 0.02
LOG_BYTES = 64 * 1024
"""Bytes at the end of a process's log that are searched for its error."""

RECOVERY = "recovery after a killed worker"
"""Name of the path that kills a worker."""
Tell = Callable[[PathResult], None]
"""A function that is called with the result of each path as soon as the result is known."""


def is_chosen(name: str, only: Sequence[str]) -> bool:
    """Return whether the path named `name` is to be tried: every path if `only` is empty, else those whose name
    contains one of the texts in `only`, whether in capital or small letters.
    """
    return not only or any(part.casefold() in name.casefold() for part in only)


@dataclass
class NodeCheck:
    """The selfcheck of the machine on which this process runs."""

    folder: Path
    """An empty folder; the caller removes it."""
    tell: Tell
    """Called with the result of each path as soon as the result is known."""
    only: Sequence[str] = ()
    """Parts of the names of the paths to run; empty: all. The path that a chosen path is compared with (its
    reference) runs too."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment variables from which those of the paths' processes are made."""
    _results: dict[str, PathResult] = field(default_factory=dict)
    """Name of a path -> its result."""
    _losses: dict[str, list[float]] = field(default_factory=dict)
    """Name of a path -> losses of its steps."""

    def run(self) -> tuple[dict[str, Any], list[PathResult]]:
        """Run the chosen paths. Return (facts about the machine as from `machine_facts`, a result for each path).

        Raises:
            HpctrainError: torch cannot be loaded.
        """
        make_corpus(self.folder / "corpus")
        env = local_environment(1, self.environ)
        with contextlib.closing(ForkingRunner(WORKER, ["fork", "--folder", str(self.folder)], env)) as runner:
            _, state = worker_reply("torch", {}, runner, "describes torch")
            compiler = shutil.which(self.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
            for path in self._chosen(paths_of(len(state["devices"]), compiler is not None)):
                self._add(_row_of_left_out(path) if isinstance(path, LeftOut) else self._checked(path, runner))
        if is_chosen(RECOVERY, self.only):
            self._add(self._timed(RECOVERY, "see logs in a run folder of `hpctrain demo`", check_recovery))
        if not self.only:
            self._add(_rocm(state))
        return machine_facts(state), list(self._results.values())

    def _chosen(self, paths: Sequence[CheckedPath | LeftOut]) -> list[CheckedPath | LeftOut]:
        chosen = [path for path in paths if is_chosen(path.name, self.only)]
        references = {path.reference for path in chosen if isinstance(path, CheckedPath)}
        return [path for path in paths if path in chosen or path.name in references]

    def _add(self, result: PathResult) -> None:
        self._results[result.path] = result
        self.tell(result)

    def _checked(self, path: CheckedPath, runner: ForkingRunner) -> PathResult:
        """Run the processes of a path and return the path's row. If the reference path has no losses to compare with,
        run nothing and return a row with the verdict 'left out'."""
        if path.reference is not None and path.reference not in self._losses:
            return _row_of_left_out(LeftOut(path.name, f"'{path.reference}' failed, with which it is compared"))
        return self._timed(path.name, path.next_step, lambda folder: self._run_processes(path, folder, runner))

    def _timed(self, name: str, next_step: str, work: Callable[[Path], CheckResult]) -> PathResult:
        start = time.monotonic()
        folder = self.folder / f"path-{len(self._results)}"
        try:
            result = work(folder)
        except HpctrainError as error:
            result = CheckResult(verdict="failed", figure=str(error)[:SUMMARY_CHARS])
        return PathResult(
            path=name, verdict=result.verdict, figure=result.figure, expected=result.expected,
            next_step="" if result.verdict == "ok" else next_step, seconds=time.monotonic() - start,
        )  # fmt: skip

    def _run_processes(self, path: CheckedPath, folder: Path, runner: ForkingRunner) -> CheckResult:
        """Run a path's processes to their end, and return the result that rank 0 wrote.

        Args:
            folder: a new folder for the path.
            runner: starts processes by the fork server.

        Raises:
            HpctrainError: a process failed, or the path took longer than `PATH_S`.
        """
        if path.degrees is None:
            folder.mkdir()
        else:
            make_run(folder, self.folder / "corpus", SPEC, SEQUENCES, SEQ_LEN, optimizer=OPTIMIZER, **path.keys)
            path.degrees.plan(path.devices()).write(folder / "given.json")
        order = CheckOrder(
            check=path.check, folder=str(folder), device=path.device, world=path.world,
            reference=self._losses.get(path.reference or "", []),
        )  # fmt: skip
        env = local_environment(path.world, self.environ)
        if path.device == "cpu":
            env |= dict.fromkeys(VISIBLE_VARIABLES, NO_GPU)
        processes: list[Process] = []
        try:
            for rank in range(path.world):
                argv = [*WORKER, "check", json.dumps(order.model_copy(update={"rank": rank}).to_json())]
                processes.append(runner.start(argv, env, folder / f"rank-{rank}.log"))
            _wait(processes, folder)
        finally:
            for process in processes:
                end_process(process)
        result = CheckResult.read(folder / "result.json", owned=True)
        if result.losses:
            self._losses[path.name] = result.losses
        return result


def _wait(processes: Sequence[Process], folder: Path) -> None:
    """Wait until all processes of a path have ended with exit code 0.

    Args:
        folder: the path's folder, with a log of each rank.

    Raises:
        HpctrainError: a process failed, or they took longer than `PATH_S`; the message has the last line of a log.
    """
    deadline = time.monotonic() + PATH_S
    while True:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            code = codes[failed]
            how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
            raise HpctrainError(_last_line(folder / f"rank-{failed}.log") or f"rank {failed} {how}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise HpctrainError(
                f"did not end within {PATH_S:g} s: {_last_line(folder / 'rank-0.log') or 'it said nothing'}"
            )
        time.sleep(POLL_S)


def _last_line(log: Path) -> str:
    """Return the last line of a log, which names the error if the process ended by one; empty if the log is empty."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _row_of_left_out(path: LeftOut) -> PathResult:
    return PathResult(path=path.name, verdict="left out", figure=path.reason, seconds=0.0)


def _rocm(state: Mapping[str, Any]) -> PathResult:
    """Return the row that says whether the paths on GPUs ran on ROCm, from `state`, the answer of `hpctrain.worker
    torch`.
    """
    if state["hip_version"] is None:
        return _row_of_left_out(LeftOut("ROCm", f"this torch is built for {_build(state)}"))
    if not state["devices"]:
        return _row_of_left_out(LeftOut("ROCm", "no GPU"))
    figure = f"the rows of GPUs ran on ROCm {state['hip_version']}"
    return PathResult(path="ROCm", verdict="ok", figure=figure, seconds=0.0)


def _build(state: Mapping[str, Any]) -> str:
    return f"CUDA {state['cuda_version']}" if state["cuda_version"] else "CPUs"


def machine_facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reader of the report has to know about the machine, and nothing that identifies a person: name of a
    fact -> value. The names are python, kernel, architecture, processor, cores, driver, and those of `state`.

    Args:
        state: the answer of `hpctrain.worker torch`: versions, backends and GPUs.
    """
    system = platform.uname()
    with open_nvml():
        driver = driver_version()
    return {
        "python": platform.python_version(), "kernel": system.release, "architecture": system.machine,
        "processor": cpu_name(), "cores": usable_cpus(), "driver": driver, **state,
    }  # fmt: skip
