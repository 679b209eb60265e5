"""Reads the secrets (tokens) that a run needs. The run file only names them: their values stay in the environment, or
in a file that only its owner can read, and never get into the run folder or the job script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.base.errors import InputError
from hpctrain.base.owned_files import read_private_text
from hpctrain.records.run.run import Run
from hpctrain.runs.notify import notify_url
from hpctrain.runs.secret_text import find_secret, is_literal, is_secret_name

SECRETS_BYTES_MAX = 1 << 20
"""Bytes of the largest file of tokens that is read."""


def check_secrets(run: Run, environ: Mapping[str, str]) -> None:
    """Check that the run file holds no secret, and that every secret it names has a value.

    Raises:
        InputError: a secret is in the run file, or has no value; the message does not repeat the secret.
    """
    for where, text in _texts(run.to_json()):
        name = where.rpartition(".")[2]
        secret = name if is_secret_name(name) and is_literal(text) else find_secret(text)
        if secret is not None:
            raise _secret_in_run_file_error(where, secret)
    secret_values(run, environ)
    if run.notify is not None:
        notify_url(run.notify, environ)


def secret_values(run: Run, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the run's secrets, from its file, else from the environment.

    Raises:
        InputError: one is missing, the file cannot be read, or others can read it.
    """
    given = _read(Path(run.secrets_file)) if run.secrets_file is not None else {}
    values = {name: given.get(name) or environ.get(name, "") for name in run.secrets}
    missing = [name for name, value in values.items() if not value]
    if missing:
        also = f", nor in {run.secrets_file}" if run.secrets_file else ""
        raise InputError(
            f"secrets: {', '.join(missing)} is not in the environment{also}; export it here, or give secrets_file"
        )
    return values


def _read(path: Path) -> dict[str, str]:
    lines = read_private_text(path, SECRETS_BYTES_MAX, "secrets_file").splitlines()
    values = {}
    for number, line in enumerate(lines, start=1):
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if name and not name.startswith("#"):
            if not equals or not name.isidentifier():
                raise InputError(f"secrets_file: {path}:{number}: found no NAME=value; write one a line")
            values[name] = value.strip("\"'")
    return values


def _texts(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in the run file, with its key."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{where}[{number}]")


def _secret_in_run_file_error(where: str, secret: str) -> InputError:
    name = secret if secret.isidentifier() else "NAME"
    return InputError(
        f"{where}: found what looks like a secret ({secret}); this file is kept in the run folder and shown: leave it "
        f"out, put the value into the environment or a secrets_file, and write secrets: [{name}]"
    )
