"""`watch` and `logs -f` beside a run on the lab: started before something happens to it, asked afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

END_S = 600
"""The end of a run is in its files, which are read every second: this only ends a hang."""


class Followed:
    """Both commands on one run; what they print goes to files."""

    def __init__(self, cluster, run: Path, out: Path) -> None:
        program = [sys.executable, "-m", "hpctrain"]
        out.mkdir()
        self._watched, self._logged = out / "watch.txt", out / "logs.txt"
        self._watch = cluster.start(*program, "watch", str(run), log=self._watched)
        self._logs = cluster.start(*program, "logs", "-f", "-n", "0", str(run), log=self._logged)

    def assert_seen_to_its_end(self) -> None:
        """Both went on through the second attempt and ended by themselves when the run was done."""
        assert (self._watch.wait(END_S), self._logs.wait(END_S)) == (0, 0)
        shown = self._watched.read_text()
        assert [word for word in ("preempted, saved", "attempt 1 on ", "done: ") if word not in shown] == []
        lines = self._logged.read_text().splitlines()
        assert sum(" | attempt " in line for line in lines) == 2
        assert any(" | srun: " in line for line in lines)

    def close(self) -> None:
        """End what still runs."""
        for process in (self._watch, self._logs):
            process.kill()
            process.wait()
