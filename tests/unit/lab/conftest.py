"""A machine that does nothing but remember: its commands, its processes and its time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpctrain.base.process import CommandResult
from hpctrain.lab.machine import Machine

Answer = Callable[[tuple[str, ...]], CommandResult | None]
IDLE = "NodeName={name} Arch=x86_64 CPUTot=2 NodeAddr=198.18.7.10 State=IDLE SlurmdStartTime={started} Reason=none"


class StillClock:
    """Time passes only by sleeping."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def now(self) -> float:
        return self.time_s

    def wall(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds


@dataclass
class StartedProcess:
    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9

    def terminate(self) -> None:
        self.code = -15

    def wait(self, timeout_s: float | None = None) -> int | None:
        return self.code


@dataclass
class Desk:
    """Runner and process table in one: `log` holds all that was done, in order."""

    log: list[tuple[str, ...]] = field(default_factory=list)
    table: dict[int, tuple[str, ...]] = field(default_factory=dict)
    namespaces: dict[str, set[int]] = field(default_factory=dict)
    control_alias: str | None = None
    answers: list[Answer] = field(default_factory=list)
    on_signal: Callable[[int, int], None] | None = None

    def run(
        self, argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        argv = tuple(argv)
        self.log.append(argv)
        for answer in self.answers:
            done = answer(argv)
            if done is not None:
                return done
        return self._usual(argv)

    def _usual(self, argv: tuple[str, ...]) -> CommandResult:
        if argv == ("ip", "-j", "netns", "list"):
            return self.says(argv, json.dumps([{"name": name} for name in self.namespaces]))
        if argv[:3] == ("ip", "netns", "pids"):
            pids = [pid for pid in self.namespaces.get(argv[3], set()) if pid in self.table]
            return self.says(argv, "\n".join(map(str, sorted(pids))))
        if argv[:5] == ("ip", "-j", "link", "show", "dev"):
            if self.control_alias is None:
                return CommandResult(argv, 1, "", 'Device "hpctctl" does not exist.')
            return self.says(argv, json.dumps([{"ifname": argv[5], "ifalias": self.control_alias}]))
        if argv[-1] == "-V":
            return self.says(argv, "slurm-wlm 22.05.8\n")
        return self.says(argv, "")

    @staticmethod
    def says(argv: tuple[str, ...], text: str) -> CommandResult:
        return CommandResult(tuple(argv), 0, text, "")

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        keep_fds: Sequence[int] = (),
    ) -> StartedProcess:
        self.log.append(("start", *argv))
        if argv[0] == "munged":
            Path(argv[2].removeprefix("--socket=")).touch()
        pid = 5000 + len(self.log)
        self.table[pid] = tuple(argv)
        return StartedProcess(pid)

    def commands(self) -> list[tuple[int, tuple[str, ...]]]:
        return list(self.table.items())

    def newest_first(self, pids: Iterable[int]) -> list[int]:
        return sorted(pids, reverse=True)

    def signal(self, pid: int, number: int) -> None:
        self.log.append(("signal", str(pid), str(int(number))))
        if number == 9:
            self.table.pop(pid, None)
        if self.on_signal:
            self.on_signal(pid, number)

    def ran(self, *beginning: str) -> list[tuple[str, ...]]:
        """Commands that begin with these words."""
        return [argv for argv in self.log if argv[: len(beginning)] == beginning]


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def machine(desk: Desk, tmp_path: Path) -> Machine:
    hosts, mounts = tmp_path / "hosts", tmp_path / "mounts"
    hosts.write_text("127.0.0.1 localhost\n")
    (tmp_path / "cpu").mkdir()
    mounts.write_text(f"cgroup {tmp_path / 'cpu'} cgroup rw,relatime,cpu,cpuacct 0 0\n")
    return Machine(
        runner=desk, clock=StillClock(), processes=desk, hosts=hosts, mounts=mounts,
        uid=lambda: 0, hostname=lambda: "vm.example", random_bytes=lambda count: bytes(count), cores=lambda: 6,
    )  # fmt: skip
