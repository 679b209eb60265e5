"""Whether a run folder is still its owner's alone: what lies in it is run, and submitit's part of it is unpickled."""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.errors import InputError
from hpctrain.base.trust import distrust


def check_trusted(folder: Path) -> None:
    """Look at the folder before anything in it is used.

    A folder that only its owner can enter guards all that is in it. In one that was opened to readers since, the files
    that are run are looked at one by one, and the key must still be private.

    Raises:
        InputError: something belongs to somebody else, or others can write to it, or read the key.
    """
    _check(folder)
    if _reason(folder, private=True) is None:
        return
    for path in (folder / "run.yaml", folder / "job.sh"):
        _check(path)
    for name in ("code", "submitit"):
        _check(folder / name)
        for path in sorted((folder / name).rglob("*")):
            # Links are submitit's own, and those of the person's code; the folder that they lie in is guarded.
            if path.suffix == ".pkl" or not path.is_symlink():
                _check(path)
    _check(folder / "key", private=True)


def _check(path: Path, private: bool = False) -> None:
    reason = _reason(path, private)
    if reason is not None:
        raise InputError(
            f"{path}: {reason}; what lies in a run folder is run as you, so it has to be yours alone: look at what is "
            "in it, then chmod -R go-rwx"
        )


def _reason(path: Path, private: bool) -> str | None:
    try:
        return distrust(path, private)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be looked at ({error.strerror})"
