"""`python -m hpctrain.node probe`: one node's part in a probe; the first node writes FOLDER/topology.json."""

from __future__ import annotations

import argparse
from pathlib import Path

from ClusterShell.NodeSet import NodeSet

from hpctrain.base.atomic import write_json
from hpctrain.base.clock import SystemClock
from hpctrain.base.process import SystemRunner
from hpctrain.probe.address import routed_address
from hpctrain.probe.resident import probe_nodes
from hpctrain.probe.settings import ProbeSettings, local_settings

LOOPBACK = "127.0.0.1"


def main(argv: list[str]) -> int:
    """Take part; returns 0 when the probe came to its end, whatever its verdict."""
    options = _parser().parse_args(argv)
    nodes = [str(name) for name in NodeSet(options.nodes)]
    settings = _settings(options, len(nodes))
    addr = options.addr or _address(options.node, nodes, options.local)
    progress_file = options.folder / "progress.json"

    def tell(phase: str, done: int, planned: int) -> None:
        write_json(progress_file, {"phase": phase, "done": done, "planned": planned})

    topology = probe_nodes(
        options.folder, options.node, nodes, addr, SystemRunner(), SystemClock(), settings, tell, options.job_id
    )
    if topology is not None:
        topology.write(options.folder / "topology.json")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpctrain.node probe", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="a folder that all nodes share")
    parser.add_argument("--node", required=True, help="name of this node")
    parser.add_argument("--nodes", required=True, help="all nodes, as a node set: 'n[01-16]'")
    parser.add_argument("--local", action="store_true", help="the nodes are processes of this machine")
    parser.add_argument("--addr", help="address of this node; default: the one that leads to the others")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "none"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job-id", help="Slurm job that measures")
    return parser


def _settings(options: argparse.Namespace, count: int) -> ProbeSettings:
    if options.local:
        return local_settings(count, options.device, options.seed)
    return ProbeSettings(seed=options.seed, device=options.device)


def _address(me: str, nodes: list[str], local: bool) -> str:
    others = [name for name in nodes if name != me]
    if local or not others:
        return LOOPBACK
    return routed_address(others[0])
