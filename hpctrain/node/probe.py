"""`python -m hpctrain.node probe`: one node's part in a probe; the first node writes FOLDER/topology.json."""

from __future__ import annotations

import argparse
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

from hpctrain.base.atomic import write_json
from hpctrain.base.clock import SystemClock
from hpctrain.base.process import SystemRunner
from hpctrain.node.node_options import Parent, add_node_arguments, node_address
from hpctrain.probe.measure.settings import MODES, PARTIAL_FILE, ProbeSettings, default_mode, local_settings
from hpctrain.probe.pair_selection.switches import switches_of
from hpctrain.probe.protocol.run import ProbeNode, probe_nodes
from hpctrain.records.topology.topology import Topology


def main(argv: list[str]) -> int:
    """Take part in the probe; return 0 when the probe completed, whatever its verdict."""
    options = _parser().parse_args(argv)
    place = node_address(options)
    if options.parent is not None:
        threading.Thread(target=_exit_with_parent, args=(options.parent,), daemon=True).start()
    settings = _settings(options, len(place.nodes))
    progress_file = options.folder / "progress.json"

    def tell(phase: str, done: int, planned: int) -> None:
        write_json(progress_file, {"phase": phase, "done": done, "planned": planned})

    topology = probe_nodes(
        ProbeNode(place.node, place.addr, options.folder, settings, SystemRunner(), SystemClock()),
        place.nodes,
        progress=tell,
        job_id=options.job_id or os.environ.get("SLURM_JOB_ID"),
        keep=lambda measured: _write_topology(measured, options.folder),
        prior=switches_of(Topology.read(options.prior)) if options.prior is not None else None,
    )
    if topology is not None:
        topology.write(options.folder / "topology.json")
    return 0


def _write_topology(measured: Topology, folder: Path) -> None:
    """Write the topology as measured so far, and remove the pair files that it no longer names."""
    measured.write(folder / PARTIAL_FILE)
    named = measured.fabric.matrix
    for old in folder.glob("pairs-*.npz"):
        if named is None or old.name != named.file:
            old.unlink(missing_ok=True)


def _exit_with_parent(parent: int) -> None:
    """End this process when the process `parent` that started it has ended, even if it ended before this call."""
    started_for = Parent(parent)
    while not started_for.is_gone():
        time.sleep(0.5)
    os._exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpctrain.node probe", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="a folder that all nodes share")
    add_node_arguments(parser)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "none"], default="auto")
    parser.add_argument("--mode", choices=MODES, help="default: by the number of nodes")
    parser.add_argument("--prior", type=Path, help="a topology that says which nodes share a switch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job-id", help="Slurm job that measures")
    return parser


def _settings(options: argparse.Namespace, count: int) -> ProbeSettings:
    mode = options.mode or default_mode(count)
    if options.local:
        return replace(local_settings(count, options.device, options.seed), mode=mode)
    return ProbeSettings(seed=options.seed, device=options.device, mode=mode)
