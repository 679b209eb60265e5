"""A topology file that a command was given: some of its nodes are selected, and warnings say if it may be out of
date."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import FileError, InputError, RefusedError
from hpctrain.cli.options.parameters import node_names
from hpctrain.launch.preflight.checks import MAX_AGE_DAYS
from hpctrain.launch.preflight.stale_topology import stale_topology_text
from hpctrain.records.format.node_name import compress_node_set
from hpctrain.records.topology.topology import Topology


def nodelist_option(text: str) -> Callable[..., Any]:
    """Return the decorator that gives a command the option `-w/--nodelist`.

    Args:
        text: the option's help.
    """
    return click.option("-w", "--nodelist", metavar="NODES", help=text)


def select_nodes(topology: Topology, nodes: str, source: Path) -> Topology:
    """Return the topology reduced to `nodes`.

    Args:
        nodes: node set of the option `--nodelist`, such as local[0-2].
        source: path of the topology file, for errors.

    Raises:
        InputError: `nodes` is no node set.
        RefusedError: the file has no figures of some of the nodes.
    """
    wanted = node_names("--nodelist", nodes)
    known = [node.id for node in topology.nodes]
    missing = [node for node in wanted if node not in known]
    if missing:
        raise RefusedError(
            f"{source}: nodes: found {compress_node_set(known)}, it has no figures of {compress_node_set(missing)}; "
            "probe these nodes, or name others with --nodelist"
        )
    return topology.only(wanted)


@contextmanager
def errors_name_file(source: Path) -> Iterator[None]:
    """In errors of the code within that begin with "topology:", replace this word by the path of the topology file;
    raise other errors unchanged.

    Args:
        source: path of the topology file.
    """
    try:
        yield
    except FileError as error:
        raise FileError(source if error.path == "topology" else error.path, error.mistakes) from None
    except (InputError, RefusedError) as error:
        text = str(error)
        if not text.startswith("topology: "):
            raise
        raise type(error)(f"{source}: {text.removeprefix('topology: ')}") from None


def warn_if_stale(
    topology: Topology | None, nodes: Collection[str] | None = None, max_age_days: float = MAX_AGE_DAYS
) -> None:
    """Warn on stderr about each reason why a plan made from the topology may be wrong now, such as other nodes, other
    drivers, or age (`staleness`). For a topology of None nothing is printed.

    Args:
        nodes: nodes that the run gets; None: the nodes of this process's allocation. A process outside an allocation
            does not compare nodes.
        max_age_days: a topology older than this is too old.

    Raises:
        FileError: provenance.created of the topology is no time.
    """
    for words in stale_topology_text(topology, nodes, SystemClock().wall(), max_age_days):
        click.echo(f"warning: {words}", err=True)
