"""The folder that a command fills with a model: checked before, and made whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from hpctrain.base.atomic import storage_errors, swap, sync
from hpctrain.base.errors import InputError
from hpctrain.corpus.prepare.tokenizer import TOKENIZER_NAME
from hpctrain.hf.tensors import INDEX, SINGLE

ExportFormat = Literal["hf", "dcp"]
"""Format of an export's tensors: safetensors files, or torch's distributed checkpoint (DCP)."""
_WEIGHTS_NAMES = (SINGLE, INDEX)
"""Files of which a model's folder has one: it has one file of tensors, or several and an index."""
_DCP_NAMES = {".metadata", TOKENIZER_NAME}
"""Files that each export as DCP has, and no checkpoint of a run."""


def check_output(output: Path, force: bool) -> None:
    """Check that writing to `output` replaces nothing, or with `force` only a model folder.

    Raises:
        InputError: `output` is a file, is a run folder or lies in one, cannot be read, holds any files without `force`,
            or with `force` holds other things than a model.
    """
    for parent in (output, *output.parents):
        if (parent / "run.yaml").is_file() and (parent / "generations").is_dir():
            raise InputError(f"-o {output}: lies in the folder of the run {parent.name}; name a folder outside of it")
    if not output.exists():
        return
    if not output.is_dir():
        raise InputError(f"-o {output}: found a file; name a folder that is not there yet")
    try:
        held = sorted(path.name for path in output.iterdir())
    except OSError as error:
        raise InputError(f"-o {output}: cannot look into it: {error.strerror}") from None
    if not held:
        return
    if not force:
        raise InputError(f"-o {output}: holds {held[0]}; name a new folder, or replace the model in it with --force")
    is_model = bool(set(held) & set(_WEIGHTS_NAMES)) or set(held) >= _DCP_NAMES
    if not is_model or any((output / name).is_dir() for name in held):
        raise InputError(
            f"-o {output}: --force replaces a folder with a model ({_WEIGHTS_NAMES[0]}, or .metadata and "
            "tokenizer.json, and files beside it), and this holds other things; name a new folder"
        )


@contextlib.contextmanager
def made_whole(output: Path, force: bool) -> Iterator[Path]:
    """Yield a new temporary folder beside `output`. The temporary folder replaces `output` when the context ends, and
    is removed if the context ends with an error. Temporary folders of killed processes are removed first.

    Args:
        force: whether to replace a model folder.

    Raises:
        InputError: at the end, `output` holds files that may not be replaced.
        StorageError: the folder cannot be made or renamed.
    """
    for leftover in output.parent.glob(f".{glob.escape(output.name)}.????????.tmp"):
        with _locked(leftover) as unused:
            if unused:
                shutil.rmtree(leftover, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        made = _new_folder(output, stack)
        yield made
        with storage_errors(output):
            sync(made)
            check_output(output, force)
            swap(made, output, replace=force)
            sync(output.parent)


def _new_folder(output: Path, stack: contextlib.ExitStack) -> Path:
    """Return a new temporary folder beside `output`, which is locked until `stack` ends and then removed.

    A process that removes the folders of killed ones may remove a new one before it is locked. Then another is made. On
    a file system without locks, nothing is removed, and the third folder is used.
    """
    for _ in range(3):
        made = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
        with storage_errors(output):
            made.mkdir(parents=True)
        held = stack.enter_context(_locked(made))
        stack.callback(shutil.rmtree, made, ignore_errors=True)
        if held and made.is_dir():
            break
    return made


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock, which ends with this process. Yield whether it is held: not if another process holds it, on
    a file system without locks, or if the path is no folder of this user."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(descriptor).st_uid == os.geteuid()
        except OSError:
            held = False
        yield held
