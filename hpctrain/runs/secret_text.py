"""Recognizes secrets in the text of a file: a token by its name or by its form. Pure."""

from __future__ import annotations

import re

_NAME = re.compile(
    r"(?:^|_)(?:(?i:TOKEN|API_?KEYS?|(?:ACCESS|PRIVATE|SECRET)_KEY|SECRETS?|CREDENTIALS?|JWT)|KEYS?)$|(?i:PASSWORD|PASSWD)"
)
_WORD = re.compile(r"(?:^|_)(?:BOS|CLS|END|EOS|MASK|PAD|SEP|SPECIAL|START|STOP|UNK)_TOKEN$", re.IGNORECASE)
"""Names of a tokenizer's special tokens."""
_SHORTEST = 6
"""Characters of the shortest value that counts as a secret: NUM_KEYS=8 does not."""
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
"""Forms of tokens by service, to find them where they should not be."""


def is_secret_name(name: str) -> bool:
    """Whether the name of an environment variable is typical for a token: HF_TOKEN, WANDB_API_KEY."""
    return _NAME.search(name) is not None and _WORD.search(name) is None


def find_secret(text: str) -> str | None:
    """Return what looks like a secret in a line of shell or any other text, without the secret itself; None if nothing
    does.

    A variable whose value is evaluated when the line runs (`$OTHER`, `$(cat file)`), or is a path, holds none.
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
    """Whether a variable's value is written out, is no path, and is long enough to be a secret."""
    bare = value.strip("\"'")
    return len(bare) >= _SHORTEST and not bare.startswith(("$", "`", "/", "~", "./", "../"))
