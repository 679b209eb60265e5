"""Starts the virtual nodes local0, local1, … of local runs and probes, as processes of this machine with one CPU device
each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ClusterShell.NodeSet import NodeSet

from hpctrain.base.module_argv import program
from hpctrain.base.process import Process, Runner
from hpctrain.launch.container_command import container_command, python_command
from hpctrain.records.run.run import Run


def local_nodes(count: int) -> list[str]:
    """Return the names of `count` virtual nodes: local0, local1, …"""
    return [f"local{index}" for index in range(count)]


def local_environment(count: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables of one of `count` virtual nodes. Unless set already, its number of threads is an
    equal share of this machine's cores.

    Args:
        environ: variables to begin with; None: those of this process.
    """
    env = dict(os.environ if environ is None else environ)
    cores = len(os.sched_getaffinity(0))
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    # gloo must listen on the loopback interface, whatever interface the host name resolves to.
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


@dataclass(frozen=True)
class LocalNodes:
    """Virtual nodes of this machine that work on one folder: of a run, or of a probe."""

    folder: Path
    nodes: Sequence[str]
    runner: Runner
    run: Run | None = None
    """The run of `folder`; if it has an image, the nodes run inside the image. None for a probe."""

    def start(
        self, verb: str, node: str, log: Path, extra: Sequence[str] = (), keep_fds: Sequence[int] = ()
    ) -> Process:
        """Start one virtual node: `hpctrain.node VERB --folder F --node local0 --nodes local[0-3] --local`.

        Args:
            verb: command of `hpctrain.node`: run or probe.
            log: file for the process's output.
            extra: further arguments of the command.
            keep_fds: file descriptors that the process inherits.
        """
        words = program("hpctrain.node") if self.run is None else python_command(self.run, "hpctrain.node")
        argv = [*words, verb, "--folder", str(self.folder), "--node", node]
        argv += ["--nodes", str(NodeSet.fromlist(list(self.nodes))), "--local"]
        # A child passes --parent because its parent could have died already, and getppid would then name another
        # process.
        argv += ["--parent", str(os.getpid()), *extra]
        argv = argv if self.run is None else container_command(self.run, self.folder, argv)
        return self.runner.start(argv, env=local_environment(len(self.nodes)), log=log, keep_fds=keep_fds)
