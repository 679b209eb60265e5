"""The folder that a command fills with a model: checked before, and made whole or not at all."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from hpctrain.base.atomic import storage_errors, swap, sync
from hpctrain.base.errors import InputError
from hpctrain.hf.config import CONFIG_NAME


def check_output(output: Path, force: bool) -> None:
    """Check that writing to `output` replaces nothing, or with `force` only a model folder.

    Raises:
        InputError: `output` is a file, holds any files without `force`, or with `force` holds other things than a
            model.
    """
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
    if CONFIG_NAME not in held or any((output / name).is_dir() for name in held):
        raise InputError(
            f"-o {output}: --force replaces a folder with a model ({CONFIG_NAME} and files beside it), and this holds "
            f"other things; name a new folder"
        )


@contextlib.contextmanager
def made_whole(output: Path) -> Iterator[Path]:
    """Yield a new temporary folder beside `output`. The temporary folder replaces `output` when the context ends, and
    is removed if the context ends with an error."""
    made = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    with storage_errors(made):
        made.mkdir(parents=True)
    try:
        yield made
        with storage_errors(output):
            sync(made)
            swap(made, output)
            sync(output.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)
