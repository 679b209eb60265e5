"""The rules for names in topology.json: which names a device type may have, that no name is given twice, and that each
node that a part refers to exists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence

DEVICE_TYPE = r"^[^=\x00-\x1f\x7f]{1,200}$"
"""Pattern of the name of a device type: a text without '=', which ends the name in the option `--power TYPE=WATTS`."""


def distinct(field: str, what: str, values: Sequence[str]) -> set[str]:
    """Return the values as a set.

    Args:
        field: field of topology.json that has the values, for errors.
        what: what a value is, for errors.

    Raises:
        ValueError: a value is given twice.
    """
    known = set(values)
    if len(known) < len(values):
        twice = next(value for value, count in Counter(values).items() if count > 1)
        raise ValueError(f"{field}: {what} {twice!r} is given twice; remove one of the entries, or rename it")
    return known


def check_known(field: str, names: Iterable[str], nodes: Container[str]) -> None:
    """Check that all `names`, which stand in `field` of topology.json, are in `nodes`.

    Raises:
        ValueError: a name is not in `nodes`.
    """
    unknown = next((name for name in names if name not in nodes), None)
    if unknown is not None:
        raise ValueError(f"{field}: {unknown!r} is not a node of this file")
