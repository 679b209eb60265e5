"""A folder full of modules that tell when somebody imports them, under the names that every program imports."""

from __future__ import annotations

import sys
from pathlib import Path

INSTALLED = ("hpctrain", "torch", "numpy", "cloudpickle", "yaml", "pydantic", "psutil", "rich", "click", "safetensors")
"""Packages that hpctrain's processes import; of submitit there is a folder, as it is one."""

TRAP = """import sys
with open({caught!r}, "a") as file:
    print({name!r}, *sys.orig_argv, file=file)
raise SystemExit(66)
"""


def lay_traps(folder: Path, caught: Path) -> None:
    """Write such modules into a folder; each that is imported writes its name and the process's words to `caught`."""
    (folder / "submitit").mkdir(parents=True)
    files = {name: f"{name}.py" for name in (*sys.stdlib_module_names, *INSTALLED)}
    for name, file in {**files, "submitit": "submitit/__init__.py"}.items():
        (folder / file).write_text(TRAP.format(caught=str(caught), name=name))
