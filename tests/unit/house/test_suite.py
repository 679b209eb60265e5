"""The suite's own promises: what is left out is named, a part that must be there is, and no process is left behind."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys

import psutil
import pytest

TESTS = {
    "needs": """
import pytest

@pytest.mark.requires("measured_runs")
def test_of_the_table(measured_runs):
    assert measured_runs.is_file()
""",
    "typo": """
import pytest

@pytest.mark.requires("mesured_runs")
def test_of_nothing():
    pass
""",
    "leaves": """
import subprocess

def test_that_leaves_something():
    print("pid", subprocess.Popen(["sleep", "300"], start_new_session=True).pid)
""",
}


@pytest.fixture
def suite(repository, tmp_path):
    """Runs one of TESTS with this suite's conftest in a pytest of its own."""

    def run(name: str, **environ: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / f"test_{name}.py"
        path.write_text(TESTS[name])
        env = {**os.environ, "PYTHONPATH": str(repository / "tests"), **environ}
        argv = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", str(repository / "pyproject.toml"), "-s"]
        argv += ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(path)]
        return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)

    return run


@pytest.mark.slow
def test_what_needs_a_missing_part_is_left_out_by_name(suite, tmp_path):
    done = suite("needs", HPCTRAIN_DATA=str(tmp_path), HPCTRAIN_REQUIRE="")
    assert done.returncode == 0
    assert "left out on this machine" in done.stdout
    assert f"test_needs.py::test_of_the_table  (measured_runs: there is no {tmp_path}/measured_runs.csv" in done.stdout
    assert "1 skipped" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_part_that_must_be_there_fails_its_tests_when_it_is_not(suite, tmp_path):
    done = suite("needs", HPCTRAIN_DATA=str(tmp_path), HPCTRAIN_REQUIRE="slurm,measured_runs")
    assert done.returncode == 1
    assert "measured_runs is missing though HPCTRAIN_REQUIRE names it" in done.stdout


@pytest.mark.slow
def test_what_needs_a_part_that_is_there_runs(suite, tmp_path):
    (tmp_path / "measured_runs.csv").touch()
    done = suite("needs", HPCTRAIN_DATA=str(tmp_path))
    assert done.returncode == 0
    assert "1 passed" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_an_unknown_part_is_a_mistake(suite):
    done = suite("typo")
    assert done.returncode == 1
    allowed = re.search(r"requires\('mesured_runs'\): allowed: (.*)", done.stdout)
    assert "measured_runs" in allowed[1].split(", ")


@pytest.mark.slow
def test_a_process_left_behind_is_named_ended_and_a_failure(suite):
    done = suite("leaves")
    assert done.returncode == 1
    pid = int(done.stdout.partition("pid ")[2].split()[0])
    assert "processes that outlived the tests" in done.stdout
    assert f"{pid}: sleep 300" in done.stdout
    # Ended: gone, or a zombie that its adoptive parent has not buried yet.
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_no_folder_of_tests_is_left_out(repository, pytestconfig):
    """pytest passes silently over folders with certain names, "dist" among them, unless it is told otherwise."""
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent for path in (repository / "tests").rglob("test_*.py")}
    left_out = [
        folder for folder in folders for part in folder.relative_to(repository).parts
        if any(fnmatch.fnmatch(part, pattern) for pattern in patterns)
    ]  # fmt: skip
    assert left_out == []
