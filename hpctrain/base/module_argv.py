"""Builds the command lines of hpctrain's own processes: Python, a module, and no current folder on `sys.path`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
"""The folder of hpctrain's own code."""


def program(
    module: str, python: str | None = None, package: Path | str = PACKAGE, flags: Sequence[str] = ()
) -> list[str]:
    """Return the argv that runs a module as `python -m` does, but without the current folder on the module path. The
    caller appends the module's own arguments.

    Args:
        python: the interpreter; None: the one of this process.
        package: path of hpctrain's folder for that interpreter, such as a path within a container.
        flags: options of Python itself.
    """
    return [python or sys.executable, *flags, f"{package}/base/start.py", module]


@contextlib.contextmanager
def outside_current_folder() -> Iterator[Path]:
    """Change to the folder of Python's standard library in the `with` block, and yield the previous folder.

    multiprocessing starts its children with `python -c`, which imports from the current folder, where others may have
    put files. A child has to change to the yielded folder by itself.
    """
    with contextlib.ExitStack() as back:
        here = Path.cwd()
        descriptor = os.open(".", os.O_PATH)
        back.callback(os.close, descriptor)
        back.callback(os.fchdir, descriptor)
        os.chdir(Path(os.__file__).parent)
        yield here


def set_safe_path(environ: MutableMapping[str, str]) -> None:
    """Stop Python processes that inherit `environ` from importing from the current folder (from Python 3.11 on).

    Scripts that inherit `environ` cannot import from their own folder either. So call this only for processes in which
    a library starts `python -c`, as torch.compile does.
    """
    environ["PYTHONSAFEPATH"] = "1"


def without_implied_folder(environ: MutableMapping[str, str]) -> None:
    """Remove empty items from PYTHONPATH in `environ`, for the processes that inherit it.

    Python takes an empty item for the current folder. `export PYTHONPATH=$PYTHONPATH:/mine` makes an empty item if the
    variable was not set before.
    """
    items = environ.get("PYTHONPATH", "").split(os.pathsep)
    if "" in items and "PYTHONPATH" in environ:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, items))
