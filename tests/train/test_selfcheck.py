"""The selfcheck on this machine: its real paths, and paths that fail, hang and die."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked_python
import psutil
import pytest

from hpctrain.records.history.selfcheck import PathResult, SelfcheckReport
from hpctrain.selfcheck import node
from hpctrain.selfcheck.paths import CheckedPath, LeftOut, paths_of

# The limits end a hang only: on a busy machine, compiling takes minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_every_path_of_this_machine_is_well(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    done = forked_python.run(["selfcheck", "--json", "-o", str(output)], tmp_path, os.environ)
    assert done.returncode in (0, 3), done.stdout[-4000:] + done.stderr[-4000:]
    report = SelfcheckReport.from_json(json.loads(done.stdout))
    assert report == SelfcheckReport.read(output, owned=True)
    assert output.stat().st_mode & 0o077 == 0
    verdicts = {path.path: path.verdict for path in report.paths}
    ran = {path.name for path in paths_of(0, True) if isinstance(path, CheckedPath)} - {"compile"}
    assert {verdicts[name] for name in ran} <= {"ok", "slow"}, report
    assert verdicts["recovery after a killed worker"] == "ok"
    assert list(report.machines) == ["local0"]
    assert str(Path.home()) not in done.stdout
    assert list(tmp_path.iterdir()) == [output]


def check(paths: list[CheckedPath | LeftOut], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, PathResult]:
    """The rows of these paths alone."""
    monkeypatch.setattr(node, "paths_of", lambda gpus, compiles: paths)
    monkeypatch.setattr(node, "check_recovery", lambda path: node.CheckResult())
    _, rows = node.NodeCheck(folder, lambda row: None, environ=os.environ | {"OMP_NUM_THREADS": "1"}).run()
    return {row.path: row for row in rows}


def test_a_failed_path_names_its_error_and_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = CheckedPath("good", "device", "", "cpu")
    bad = CheckedPath("bad", "absent", "do this", "cpu")
    compared = CheckedPath("compared", "plan", "", "cpu", reference="bad")
    rows = check([bad, compared, LeftOut("away", "no GPU"), good], tmp_path, monkeypatch)
    assert rows["good"].verdict == "ok"
    assert (rows["bad"].verdict, rows["bad"].next_step) == ("failed", "do this")
    assert "absent" in rows["bad"].figure
    assert rows["compared"].figure == "'bad' failed, with which it is compared"
    assert (rows["away"].verdict, rows["away"].figure) == ("left out", "no GPU")


def test_a_path_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "PATH_S", 0.0)
    row = check([CheckedPath("long", "all_reduce", "", "cpu", 2)], tmp_path, monkeypatch)["long"]
    assert row.verdict == "failed"
    assert row.figure == "did not end within 0 s: it said nothing"
    assert not [child for child in psutil.Process().children(recursive=True) if "check" in child.cmdline()]
