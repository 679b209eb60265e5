"""Tasks over processes: their order, their errors, and a worker that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, signal, sys, time
from dataclasses import dataclass
from pathlib import Path
from hpctrain.base.errors import FileError, HpctrainError, FieldError
from hpctrain.corpus.prepare.pool import WorkerPool

@dataclass(frozen=True)
class Task:
    number: int
    kind: str = "fine"

    def run(self, report):
        if self.kind != "quiet":
            report(self.number)
        if self.kind == "meets":  # the other one of these two, in another process
            Path(__file__).with_name(f"met-{self.number}").touch()
            while not Path(__file__).with_name(f"met-{1 - self.number}").exists():
                time.sleep(0.01)
        if self.kind == "wrong file":
            raise FileError("f", [FieldError("key", "is wrong", 3)])
        if self.kind == "mistake":
            1 // 0
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2 if self.number == 0 or self.kind == "quiet" else 0)
        return self.number, os.getpid()

def outcome(pool, kind):
    try:
        list(pool.run([Task(0), Task(1, kind), Task(2)], lambda count: None))
    except Exception as error:
        return f"{type(error).__name__}: {error}"

if __name__ == "__main__":
    seen = []
    with WorkerPool(2) as pool:
        tasks = [Task(number, "meets" if number < 2 else "fine") for number in range(9)]
        results = list(pool.run(tasks, seen.append))
        told = [outcome(pool, kind) for kind in ("wrong file", "mistake", "killed")]
        again = [number for number, _ in pool.run(map(Task, range(3)), seen.append)]
        # While this process hears how far the first is, both are done.
        both = [number for number, _ in pool.run([Task(1), Task(2, "quiet")], lambda count: time.sleep(1))]
    print(json.dumps([[r[0] for r in results], len({r[1] for r in results}), sum(seen), told, again, both]))
"""


@pytest.mark.slow
def test_results_are_in_order_and_errors_end_the_work(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True, timeout=600
    )
    numbers, processes, advanced, told, again, both = json.loads(done.stdout)
    assert (numbers, processes, advanced, again) == (list(range(9)), 2, 36 + 3, [0, 1, 2])
    assert both == [1, 2]
    assert told[0] == "InputError: f:3: key: is wrong"
    assert told[1] == "ZeroDivisionError: integer division or modulo by zero"
    assert told[2].startswith("HpctrainError: a worker process ended by signal 9; where memory is short, use fewer")
