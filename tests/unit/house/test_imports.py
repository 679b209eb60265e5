"""What importing costs: no torch outside the workers, scipy only where it is used, and little for `hpctrain --help`."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
IMPORT_ALL = """
import importlib, json, pkgutil, sys
names = []
for room in {rooms}:
    package = importlib.import_module(room)
    names.append(room)
    names += [found.name for found in pkgutil.walk_packages(package.__path__, room + ".")]
for name in names:
    importlib.import_module(name)
print(json.dumps([names, sorted(sys.modules)]))
"""

HELP = """
import json, sys
sys.argv = ["hpctrain", "--help"]
from hpctrain.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
sys.stdout.flush()
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rooms",
    [
        ["hpctrain.cli", "hpctrain.node", "hpctrain.doctor"],
        ["hpctrain.base", "hpctrain.records", "hpctrain.schedule", "hpctrain.corpus"],
        ["hpctrain.probe", "hpctrain.planner", "hpctrain.launch", "hpctrain.agent", "hpctrain.report", "hpctrain.lab"],
    ],
    ids=lambda rooms: "+".join(room.removeprefix("hpctrain.") for room in rooms),
)
def test_every_module_of_these_rooms_loads_without_torch_and_scipy(rooms):
    imported, loaded = json.loads(python(IMPORT_ALL.format(rooms=rooms)).stdout)
    assert set(rooms) < set(imported)
    assert [name for name in loaded if name.partition(".")[0] in ("torch", "scipy")] == []


@pytest.mark.slow
def test_help_loads_no_verb_and_no_heavy_library():
    done = python(HELP)
    assert "Commands:" in done.stdout
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert loaded & {"torch", "pydantic", "numpy", "scipy", "rich", "jinja2", "yaml"} == set()
    ours = {name for name in loaded if name.startswith("hpctrain.") and not name.startswith("hpctrain.base")}
    assert ours == {"hpctrain.cli", "hpctrain.cli.main"}


NAMED = re.compile(r"(?:from|-m) (hpctrain(?:\.[a-z_]+)+)(?: import ([A-Za-z_]+))?")
"""A module, and a name in it, as scripts and recipes write them."""


def test_modules_named_in_scripts_exist() -> None:
    folders = (REPOSITORY / "tools", REPOSITORY / "slurm", REPOSITORY / "containers")
    scripts = [path for folder in folders for path in folder.iterdir() if path.is_file() and path.suffix != ".py"]
    named = {
        (path.name, *words)
        for path in [REPOSITORY / "Makefile", REPOSITORY / ".ci" / "run", *scripts]
        for words in NAMED.findall(path.read_text())
    }
    assert {path for path, _, _ in named} >= {"Makefile"}
    for path, module, name in named:
        loaded = importlib.import_module(module)
        assert not name or hasattr(loaded, name), f"{path}: {module} has no {name}"
