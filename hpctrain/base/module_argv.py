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
    """Return the argv that runs a module as `python -m` does, but without the current folder on its path.

    The module's own arguments follow it.

    Args:
        python: the interpreter; default: this process's.
        package: hpctrain's folder as that interpreter sees it.
        flags: options of Python itself.
    """
    return [python or sys.executable, *flags, f"{package}/base/start.py", module]


@contextlib.contextmanager
def outside_current_folder() -> Iterator[Path]:
    """Change to the folder of Python's own library in the `with` block, whose value is the folder before.

    multiprocessing starts its children with `python -c`, which imports from the current folder. A child has to change
    to the yielded folder itself.
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

    Scripts that inherit it cannot import from their own folder either. So this is for processes in which a library
    starts `python -c`, as torch.compile does.
    """
    environ["PYTHONSAFEPATH"] = "1"


def without_implied_folder(environ: MutableMapping[str, str]) -> None:
    """Remove empty items from PYTHONPATH, for the processes that inherit it.

    Python takes an empty item for the current folder, and `export PYTHONPATH=$PYTHONPATH:/mine` makes one where the
    variable was not set before.
    """
    items = environ.get("PYTHONPATH", "").split(os.pathsep)
    if "" in items and "PYTHONPATH" in environ:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, items))
