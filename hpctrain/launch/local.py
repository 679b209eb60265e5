"""Local runs: n virtual nodes local0, local1, … as processes of this machine, one CPU device each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ClusterShell.NodeSet import NodeSet

from hpctrain.base.module_argv import program
from hpctrain.base.process import Process, Runner
from hpctrain.launch.container_command import container_command, python_command
from hpctrain.records.run.run import Run


def local_nodes(count: int) -> list[str]:
    """Return the names of `count` virtual nodes."""
    return [f"local{index}" for index in range(count)]


def local_environment(count: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of one of `count` virtual nodes: an equal share of this machine's cores as threads."""
    env = dict(os.environ if environ is None else environ)
    cores = len(os.sched_getaffinity(0))
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    # gloo must listen on loopback, whatever interface the host name resolves to.
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def start_local_node(
    verb: str,
    folder: Path,
    node: str,
    nodes: Sequence[str],
    runner: Runner,
    log: Path,
    extra: Sequence[str] = (),
    keep_fds: Sequence[int] = (),
    run: Run | None = None,
) -> Process:
    """Start one virtual node: `hpctrain.node VERB --folder F --node local0 --nodes local[0-3] --local`.

    Args:
        run: the run of `folder`; if it has an image, the node runs inside it.
    """
    words = program("hpctrain.node") if run is None else python_command(run, "hpctrain.node")
    argv = [*words, verb, "--folder", str(folder), "--node", node]
    argv += ["--nodes", str(NodeSet.fromlist(list(nodes))), "--local"]
    # The parent's id is passed on: a child that asks for it may find another parent, if its own died at once.
    argv += ["--parent", str(os.getpid()), *extra]
    argv = argv if run is None else container_command(run, folder, argv)
    return runner.start(argv, env=local_environment(len(nodes)), log=log, keep_fds=keep_fds)
