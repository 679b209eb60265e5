"""Reads the secrets (tokens) that a run needs, and recognizes secrets in text. The run file only names them: their
values stay in the environment, or in a file that only its owner can read, and never get into the run folder or the job
script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.base.errors import InputError
from hpctrain.base.owned_files import read_private_text
from hpctrain.records.run.run import Run
from hpctrain.runs.notify import notify_url

SECRETS_BYTES_MAX = 1 << 20
"""Most bytes of the file `secrets_file`; a larger file is refused."""


def check_secrets(run: Run, environ: Mapping[str, str]) -> None:
    """Check that the run file holds no secret, and that every secret it names has a value.

    Raises:
        InputError: the run file holds a secret, or a secret that it names has no value. The message does not repeat the
            secret.
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
    """Return {name: value} of the secrets that the run file names, from the file `secrets_file`, else from `environ`.

    Raises:
        InputError: a secret is missing, the file cannot be read, or others can read the file.
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
    """Yield (dotted key, text) for every text within `value`, a part of the run file.

    Args:
        where: dotted key of `value` itself; '' for the whole run file.
    """
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


_NAME = re.compile(
    r"(?:^|_)(?:(?i:TOKEN|API_?KEYS?|(?:ACCESS|PRIVATE|SECRET)_KEY|SECRETS?|CREDENTIALS?|JWT)|KEYS?)$|(?i:PASSWORD|PASSWD)"
)
_WORD = re.compile(r"(?:^|_)(?:BOS|CLS|END|EOS|MASK|PAD|SEP|SPECIAL|START|STOP|UNK)_TOKEN$", re.IGNORECASE)
"""Names of variables with a special token of a tokenizer, which is no secret."""
_SHORTEST = 6
"""Characters of the shortest value that counts as a secret, so that NUM_KEYS=8 is none."""
_ASSIGNED = re.compile(r"""(?<![\w-])([A-Za-z_]\w*)=("[^"]*"|'[^']*'|[^\s;&|]*)""")
_OPTION = re.compile(r"""--(?:\w+-)*(?:token|password|api-key|secret)(?:=|\s+)(?!["']?[$`])\S""", re.IGNORECASE)
_FORMS = (
    ("an address with a password", re.compile(r"\w://[^\s/:@$]+:(?!\$)[^\s/@]+@")),
    ("a private key", re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")),
    ("a webhook's address", re.compile(r"https://hooks\.[\w.-]+/\S+|https://[\w.-]+/api/webhooks/\S+")),
    (
        "a token",
        re.compile(
            r"\b(?:hf_\w{30,}|gh[pousr]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
            r"|A[KS]IA[0-9A-Z]{16}|hv[sbr]\.[\w-]{20,}|npm_\w{30,}|pypi-AgE[\w-]{30,}|dckr_pat_[\w-]{20,}|nvapi-[\w-]{30,}"
            r"|ya29\.[\w-]{20,}|AIza[\w-]{35}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)"
        ),
    ),
)  # fmt: skip
"""Kinds of secrets that are recognized by their form, each with the expression that finds them in a text."""


def is_secret_name(name: str) -> bool:
    """Return whether the name of an environment variable is typical for a secret, as HF_TOKEN and WANDB_API_KEY are."""
    return _NAME.search(name) is not None and _WORD.search(name) is None


def find_secret(text: str) -> str | None:
    """Return the variable's name or the kind of the first secret that a text seems to hold, such as HF_TOKEN or "a
    private key", never the secret itself; None if the text seems to hold no secret.

    A variable in a line of shell counts as no secret if its value is a path, or is evaluated when the line runs
    (`$OTHER`, `$(cat file)`).
    """
    for name, value in _ASSIGNED.findall(text):
        if is_secret_name(name) and is_literal(value):
            return str(name)
    if _OPTION.search(text):
        return "an option that takes a token or password"
    for kind, form in _FORMS:
        if form.search(text):
            return kind
    return None


def is_literal(value: str) -> bool:
    """Return whether the text of a variable's value is the value itself (no `$OTHER` or `$(…)`), is no path, and is
    long enough to be a secret."""
    bare = value.strip("\"'")
    return len(bare) >= _SHORTEST and not bare.startswith(("$", "`", "/", "~", "./", "../"))
