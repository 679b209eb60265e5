"""Data that ships with the package is found however hpctrain was installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hpctrain
from hpctrain.base.errors import InputError
from hpctrain.base.package_data import package_data_path

FOLDERS = ("containers", "docs", "slurm", "topology")
NOT_COPIED = (
    ".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "runs", "demo", "build", "dist", "*.egg-info",
)  # fmt: skip

ASK = """
import hpctrain, json
from hpctrain.base.package_data import package_data_path
places = [str(package_data_path(folder)) for folder in ("containers", "docs", "slurm", "topology")]
print(json.dumps([hpctrain.__file__, *places]))
"""


@pytest.fixture(scope="module")
def clone(repository, tmp_path_factory) -> Path:
    """The tree as a fresh checkout has it, without anything that was built in it."""
    target = tmp_path_factory.mktemp("clone") / "hpctrain"
    shutil.copytree(repository, target, ignore=shutil.ignore_patterns(*NOT_COPIED))
    return target


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory) -> Path:
    """A wheel built from it."""
    target = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(target), str(clone)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = target.glob("*.whl")
    return path


def places_from(path: Path, cwd: Path) -> list[Path]:
    """Where a Python that finds hpctrain under `path` finds the package and the data folders."""
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK], cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return [Path(text) for text in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A virtual environment with hpctrain from the wheel, and nothing else; its site-packages."""
    venv = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=600)
    (target,) = venv.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, timeout=600)
    return target


@pytest.mark.slow
def test_from_an_installed_wheel(environment, tmp_path):
    target = environment
    package, *folders = places_from(target, tmp_path)
    assert package == target / "hpctrain" / "__init__.py"
    assert folders == [target / "hpctrain" / "_data" / folder for folder in FOLDERS]


@pytest.mark.slow
def test_a_wheel_holds_every_file_of_the_data_folders_and_the_pages_of_the_report(wheel, clone):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"hpctrain/_data/{path.relative_to(clone)}"
        for folder in FOLDERS
        for path in (clone / folder).rglob("*")
        if path.is_file()
    }
    expected |= {str(path.relative_to(clone)) for path in (clone / "hpctrain" / "report" / "html" / "pages").iterdir()}
    expected.add("hpctrain/py.typed")
    assert len(expected) >= 6
    assert expected <= names
    assert [name for name in names if name.startswith(("tests/", "docs/"))] == []


@pytest.mark.slow
def test_a_project_that_uses_the_wheel_sees_its_types(environment, tmp_path):
    (tmp_path / "client.py").write_text(
        'from hpctrain.base.units import format_seconds\nreveal_type(format_seconds(90.0))\nformat_seconds("ninety")\n'
    )
    argv = [sys.executable, "-m", "mypy", "--python-executable", str(environment.parents[2] / "bin" / "python")]
    argv += ["--config-file=", "--cache-dir", str(tmp_path / "cache"), "client.py"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert 'client.py:2: note: Revealed type is "str"' in done.stdout
    assert 'client.py:3: error: Argument 1 to "format_seconds" has incompatible type "str"' in done.stdout
    assert "Found 1 error in 1 file" in done.stdout


@pytest.mark.slow
def test_from_a_plain_clone(clone, tmp_path):
    package, *folders = places_from(clone, tmp_path)
    assert package == clone / "hpctrain" / "__init__.py"
    assert folders == [clone / folder for folder in FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS)
def test_from_this_installation(folder):
    package = Path(hpctrain.__file__).parent
    assert package_data_path(folder) in (package / "_data" / folder, package.parent / folder)


def test_what_does_not_ship_is_told():
    with pytest.raises(InputError, match=r"topology/none\.json: not found in the installation"):
        package_data_path("topology", "none.json")
