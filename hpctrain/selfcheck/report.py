"""The report of a selfcheck: made of one machine, or merged from the reports of a job's nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from hpctrain import __version__
from hpctrain.base.clock import SystemClock, utc_text
from hpctrain.base.process import SystemRunner
from hpctrain.launch.local import local_nodes
from hpctrain.launch.probe import probe_local
from hpctrain.records.history.selfcheck import PathResult, SelfcheckReport
from hpctrain.records.topology.topology import Topology
from hpctrain.selfcheck.figures import rows_of
from hpctrain.selfcheck.node import NodeCheck, Tell


def check_machine(name: str, tell: Tell, only: Sequence[str] = ()) -> SelfcheckReport:
    """Run the selfcheck's paths on this machine, without a probe, and return the report.

    Args:
        name: the node's name in the report.
        tell: called with each row as soon as it is known.
        only: parts of the names of the paths to run; empty: all.

    Raises:
        HpctrainError: torch cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-selfcheck-") as folder:
        facts, paths = NodeCheck(Path(folder), tell, only).run()
    named = [path.model_copy(update={"node": name}) for path in paths]
    return SelfcheckReport(
        version=__version__, created=utc_text(SystemClock().wall()), machines={name: facts}, paths=named
    )


def check_here(tell: Tell, only: Sequence[str] = ()) -> SelfcheckReport:
    """Measure the devices of this machine as a probe of one virtual node, then run the selfcheck's paths. Return the
    report.

    Args:
        tell: called with each row of the report as soon as the row is known.
        only: texts; only paths whose name contains one of them are run, and the probe is left out. Empty: all paths
            are run, after the probe.

    Raises:
        HpctrainError: the probe failed, or torch cannot be loaded.
    """
    if only:
        return check_machine(local_nodes(1)[0], tell, only)
    with tempfile.TemporaryDirectory(prefix="hpctrain-probe-") as folder:
        topology = probe_local(1, Path(folder), SystemRunner(), SystemClock())
    rows = rows_of(topology)
    for row in rows:
        tell(row)
    return merged([check_machine(topology.nodes[0].id, tell)], rows, topology)


def merged(
    reports: Sequence[SelfcheckReport], measured: Sequence[PathResult], topology: Topology | None
) -> SelfcheckReport:
    """Return one report from the reports of several nodes.

    Args:
        reports: the reports of the nodes' paths.
        measured: rows that follow from `topology`; they come first.
        topology: what the probe measured; None if there was no probe.
    """
    return reports[0].model_copy(
        update={
            "machines": {name: facts for report in reports for name, facts in report.machines.items()},
            "paths": [*measured, *(path for report in reports for path in report.paths)],
            "topology": None if topology is None else topology.to_json(),
        }
    )
