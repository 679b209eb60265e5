"""Names of nodes and devices, and node sets as Slurm writes them: 'gpu[01-03],mig1'. A set that would expand to too
many names is refused before it is expanded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

NODES_MAX = 100_000
"""Most nodes of a node set, more than the largest cluster has; Slurm's own limit is 65,533."""

NODE_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?$"
"""Pattern of a node's name: a host name (RFC 1123), also with '_', which some sites use. A command-line option, a node
set, a blank and Slurm's 'None assigned' do not match."""
DEVICE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Pattern of a device's name within its node, such as cuda0."""

_BRACKETS = re.compile(r"\[([^\]]*)")
_RANGE = re.compile(r"(\d+)-(\d+)", re.ASCII)
_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")
_TEXT_CHARS_MAX = 2**20


def expand_node_set(text: str) -> list[str]:
    """Return the names in a node set, each once and sorted as ClusterShell sorts them: by the numbers in the names. The
    list is empty for an empty text.

    Raises:
        ValueError: the text is longer than 2^20 characters, is no node set, has more than NODES_MAX names, or has one
            that does not match NODE_NAME.
    """
    if len(text) > _TEXT_CHARS_MAX:
        raise ValueError(f"has {len(text)} characters; a set of nodes has at most {_TEXT_CHARS_MAX}")
    if _names_max(text) > NODES_MAX:
        raise ValueError(f"'{text[:100]}' has more than {NODES_MAX} names")
    try:
        # With this resolver a name with '@' is no ClusterShell group; looking a group up may run commands.
        names = [str(name) for name in NodeSet(text, resolver=RESOLVER_NOGROUP)]
    except (NodeSetException, ValueError) as error:
        raise ValueError(str(error)[:200]) from None
    strange = next((name for name in names if not re.fullmatch(NODE_NAME, name)), None)
    if strange is not None:
        raise ValueError(f"{strange[:100]!r} is no name of a node")
    return names


def compress_node_set(names: Iterable[str]) -> str:
    """Return the names folded to one node set, such as 'node[0-3]', which `expand_node_set` reads."""
    return str(NodeSet.fromlist(list(names), resolver=RESOLVER_NOGROUP))


def _names_max(text: str) -> int:
    """Return an upper bound on the number of names in a node set. Each item between commas counts with the product of
    its brackets (rack[1-8]node[1-32] has 256 names), and the items are added."""
    return sum(math.prod(map(_choices, _BRACKETS.findall(item))) for item in _OUTSIDE_BRACKETS.split(text))


def _choices(text: str) -> int:
    """Return an upper bound on how many numbers the text in a bracket stands for, such as '01-32,40'. A range with a
    number of more than 18 digits counts as NODES_MAX."""
    most = 1 + text.count(",")
    for first, last in _RANGE.findall(text):
        most += max(0, int(last) - int(first)) if max(len(first), len(last)) <= 18 else NODES_MAX
    return most


class DeviceId(str):
    """A device id: a device's name as text `node:device`, such as `node3:cuda0`. It compares like this text and is
    stored as this text."""

    node: str
    device: str
    """The device's name within its node; empty if the text has no ':'."""

    def __new__(cls, text: str) -> DeviceId:
        made = super().__new__(cls, text)
        made.node, _, made.device = text.partition(":")
        return made

    @classmethod
    def of(cls, node: str, device: str) -> DeviceId:
        """Return the device id of a node's device: 'node3:cuda0' for node3 and cuda0."""
        return cls(f"{node}:{device}")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls._from_file, core_schema.str_schema())

    @classmethod
    def _from_file(cls, text: str) -> DeviceId:
        """Return the device id that a file states. Half of a Unicode surrogate pair is refused with a ValueError,
        because it cannot be printed in a message."""
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError("node:device is expected, without halves of surrogate pairs")
        return cls(text)
