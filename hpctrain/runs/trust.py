"""Checks that only its owner can write to a run folder: hpctrain runs code in it and unpickles submitit's files."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpctrain.base.errors import InputError
from hpctrain.base.owned_files import OwnedFolder


def check_trusted(path: Path) -> None:
    """Check the run folder, and everything in it that is executed, before anything in it is used.

    Raises:
        InputError: something belongs to somebody else, others can write to it, or others can read the key.
    """
    try:
        with OwnedFolder(path) as folder:
            folder.check_entries()
            with contextlib.suppress(FileNotFoundError):
                os.close(folder.open("key", private=True))
            for name in ("code", "submitit"):
                with contextlib.suppress(FileNotFoundError):
                    folder.check_tree(name, no_links=(".pkl",))
    except OSError as error:
        raise InputError(f"{path}: cannot be looked at ({error.strerror})") from None
