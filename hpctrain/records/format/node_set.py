"""Sets of nodes as Slurm and people write them, 'gpu[01-03],mig1', unfolded with bounded work."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

NODES_MAX = 100_000
"""More than the largest cluster has; Slurm itself takes 65,533."""

NODE_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?$"
"""The characters of a host name (RFC 1123; sites use '_' too). No option, list, blank or 'None assigned' is one."""
DEVICE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Of a device within its node: cuda0."""

_BRACKETS = re.compile(r"\[([^\]]*)")
_RANGE = re.compile(r"(\d+)-(\d+)", re.ASCII)
_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")
_TEXT_CHARS_MAX = 2**20


def expand_node_set(text: str) -> list[str]:
    """The names of a set, in its order; none for an empty text.

    Raises:
        ValueError: it is no set of nodes, or of more than NODES_MAX.
    """
    if len(text) > _TEXT_CHARS_MAX:
        raise ValueError(f"has {len(text)} characters; a set of nodes has at most {_TEXT_CHARS_MAX}")
    if _names_max(text) > NODES_MAX:
        raise ValueError(f"'{text[:100]}' has more than {NODES_MAX} names")
    try:
        # A name with an '@' is no group of this machine's ClusterShell, which may run commands to look it up.
        names = [str(name) for name in NodeSet(text, resolver=RESOLVER_NOGROUP)]
    except (NodeSetException, ValueError) as error:
        raise ValueError(str(error)[:200]) from None
    strange = next((name for name in names if not re.fullmatch(NODE_NAME, name)), None)
    if strange is not None:
        raise ValueError(f"{strange[:100]!r} is no name of a node")
    return names


def compress_node_set(names: Iterable[str]) -> str:
    """The set of these names as a text, which `expand_node_set` reads."""
    return str(NodeSet.fromlist(list(names), resolver=RESOLVER_NOGROUP))


def _names_max(text: str) -> int:
    """A bound on the number of names: brackets of one item multiply (rack[1-8]node[1-32]), items add up."""
    return sum(math.prod(map(_choices, _BRACKETS.findall(item))) for item in _OUTSIDE_BRACKETS.split(text))


def _choices(text: str) -> int:
    """How many numbers '01-32,40' stands for, at most; more than NODES_MAX for a number too long to be one."""
    most = 1 + text.count(",")
    for first, last in _RANGE.findall(text):
        most += max(0, int(last) - int(first)) if max(len(first), len(last)) <= 18 else NODES_MAX
    return most
