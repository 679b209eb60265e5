"""Nothing is imported from the current folder: it is full of modules that tell when somebody imports them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import lay_traps

from hpctrain.base.module_argv import PACKAGE, outside_current_folder, program, set_safe_path, without_implied_folder
from hpctrain.base.process import WORKER
from hpctrain.corpus.prepare.pool import WorkerPool
from hpctrain.launch.local import LocalNodes


@pytest.fixture
def caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is hostile; the file that its modules write to."""
    hostile, caught = tmp_path / "hostile", tmp_path / "caught"
    lay_traps(hostile, caught)
    monkeypatch.chdir(hostile)
    return caught


def said_by(argv: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, **env})


def test_the_trap_catches_what_python_m_imports(caught: Path) -> None:
    """The other tests here would pass in an empty folder."""
    assert said_by([sys.executable, "-m", "hpctrain.node"]).returncode == 66
    assert "-m hpctrain.node" in caught.read_text()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (program("hpctrain.node"), "usage: python -m hpctrain.node"),
        ([*WORKER], "usage: python -m hpctrain.worker"),
        pytest.param([*WORKER, "torch"], '"gloo"', marks=pytest.mark.slow),
        ([*program("hpctrain"), "--version"], "hpctrain, version"),
        ([*program("submitit.core._submit", flags=["-u"]), "--help"], "Folder where the jobs are stored"),
    ],
    ids=["node", "worker", "torch", "hpctrain", "submitit"],
)
def test_no_program_of_hpctrain_imports_from_the_current_folder(caught: Path, argv: list[str], words: str) -> None:
    done = said_by(argv)
    assert words in done.stdout + done.stderr
    assert not caught.exists(), caught.read_text()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no safe path")
def test_what_a_library_starts_does_not_either_where_it_is_asked_for(caught: Path) -> None:
    env: dict[str, str] = {}
    set_safe_path(env)
    done = said_by([sys.executable, "-c", "from ctypes import cdll; import random"], **env)
    assert done.returncode == 0, done.stderr
    assert not caught.exists(), caught.read_text()


def test_arguments_exit_code_and_name_are_those_of_python_m(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import sys\nprint(__name__, __file__, *sys.argv)\nsys.exit(7)\n")
    done = said_by([*program("shown"), "a", "-b"], PYTHONPATH=str(tmp_path))
    assert done.returncode == 7, done.stderr
    assert done.stdout.split() == ["__main__", *[str(tmp_path / "shown.py")] * 2, "a", "-b"]


def test_modules_of_base_are_not_found_by_their_short_names() -> None:
    """A script's own folder is the first that Python searches."""
    done = said_by([*program("timeit"), "-n", "1", "-r", "1", "import atomic"])
    assert "No module named 'atomic'" in done.stderr
    assert (PACKAGE / "base" / "atomic.py").exists()


def test_a_virtual_node_is_started_so(tmp_path: Path) -> None:
    started = []

    class Recording:
        def start(self, argv, **more):
            started.append(argv)

    LocalNodes(tmp_path, ["local0"], Recording()).start("run", "local0", tmp_path / "log")
    assert started[0][:4] == [*program("hpctrain.node"), "run"]


class Folder:
    """A task that says where it is done."""

    def run(self, report: Callable[[int], None]) -> str:
        return str(Path.cwd())


def test_worker_processes_of_a_pool_import_nothing_from_it_and_work_in_it(caught: Path) -> None:
    with WorkerPool(2) as pool:
        assert list(pool.run([Folder(), Folder()], lambda count: None)) == [str(Path.cwd())] * 2
    assert not caught.exists(), caught.read_text()


def test_the_folder_is_the_same_after_a_start_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        with outside_current_folder() as here:
            assert (here, Path.cwd()) == (tmp_path, Path(os.__file__).parent)
            raise OSError("no process")

    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="no process"):
        fails()
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize(
    ("before", "after"), [(":/mine", "/mine"), ("/a::/b:", "/a:/b"), ("/a:.", "/a:."), ("", ""), (None, None)]
)
def test_an_empty_item_of_pythonpath_is_not_handed_on(before: str | None, after: str | None) -> None:
    environ = {} if before is None else {"PYTHONPATH": before}
    without_implied_folder(environ)
    assert environ.get("PYTHONPATH") == after
