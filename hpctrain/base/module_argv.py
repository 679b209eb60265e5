"""How processes of hpctrain begin: by the name of a module that is never looked for in the current folder."""

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
    """The argv that runs a module as `python -m` does, but for the current folder; the module's own words follow.

    Args:
        python: default: this process's own.
        package: hpctrain's folder as that Python sees it.
        flags: options of Python itself.
    """
    return [python or sys.executable, *flags, f"{package}/base/start.py", module]


@contextlib.contextmanager
def outside_current_folder() -> Iterator[Path]:
    """Start multiprocessing's children from the folder of Python's own library; the current one is the value.

    multiprocessing starts them with `python -c`, which imports from the folder that it is started in. A child has to
    return to the folder that it is given here.
    """
    with contextlib.ExitStack() as back:
        here = Path.cwd()
        descriptor = os.open(".", os.O_PATH)
        back.callback(os.close, descriptor)
        back.callback(os.fchdir, descriptor)
        os.chdir(Path(os.__file__).parent)
        yield here


def set_safe_path(environ: MutableMapping[str, str]) -> None:
    """Let no Python that libraries start from here on import from the current folder (from Python 3.11 on).

    A script that is started so does not find what lies beside it either, so this is for processes in which a library
    starts `python -c`, as torch.compile does.
    """
    environ["PYTHONSAFEPATH"] = "1"


def without_implied_folder(environ: MutableMapping[str, str]) -> None:
    """Take empty items out of PYTHONPATH, for the processes that inherit it.

    Python takes an empty item for the current folder, and `export PYTHONPATH=$PYTHONPATH:/mine` makes one where nothing
    was set before.
    """
    items = environ.get("PYTHONPATH", "").split(os.pathsep)
    if "" in items and "PYTHONPATH" in environ:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, items))
