"""Starts the virtual nodes local0, local1, … of local runs and probes: processes that share this machine's devices."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ClusterShell.NodeSet import NodeSet

from hpctrain.base.errors import InputError
from hpctrain.base.module_argv import program
from hpctrain.base.process import Process, Runner
from hpctrain.base.system.job_share import usable_cpus
from hpctrain.launch.container_command import container_command, python_command
from hpctrain.probe.system.gpu import machine_gpus
from hpctrain.records.run.run import Run

VISIBLE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that name the GPUs which a process may use, by precedence. ROCm knows the first, too."""
NO_GPU = "-1"
"""Value of the variables in `VISIBLE_VARIABLES` that hides every GPU. ROCm takes an empty value for an unset one."""
_GPU_NAME = re.compile(r"\d+$|(GPU|MIG)-")


def local_nodes(count: int) -> list[str]:
    """Return the names of `count` virtual nodes: local0, local1, …"""
    return [f"local{index}" for index in range(count)]


def local_environment(count: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables of one of `count` virtual nodes. Unless set already, OMP_NUM_THREADS is the
    node's equal share of the cores that this process may use, and GLOO_SOCKET_IFNAME the loopback interface.

    Args:
        environ: variables to begin with; None: those of this process.
    """
    env = dict(os.environ if environ is None else environ)
    cores = usable_cpus(env)
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    # gloo must listen on the loopback interface, whatever interface the host name resolves to.
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def local_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs of this machine that a process may use, as names for CUDA_VISIBLE_DEVICES; empty without any.

    These are the GPUs that CUDA_VISIBLE_DEVICES (else HIP_VISIBLE_DEVICES) in `environ` names, else those that
    ROCR_VISIBLE_DEVICES names, counted anew from 0; all GPUs of the machine if none of the variables is set.
    """
    for name in VISIBLE_VARIABLES:
        if name in environ:
            listed = (item.strip() for item in environ[name].split(","))
            # CUDA ignores the first name that it does not accept, and all names behind it.
            return list(itertools.takewhile(_GPU_NAME.match, listed))
    if "ROCR_VISIBLE_DEVICES" in environ:
        # Slurm sets it for AMD's GPUs. The two variables above count only the GPUs that it names.
        return [str(index) for index, item in enumerate(environ["ROCR_VISIBLE_DEVICES"].split(",")) if item.strip()]
    return machine_gpus()


def share_gpus(gpus: Sequence[str], count: int) -> list[list[str]]:
    """Return the GPUs of each of `count` virtual nodes: a range of `gpus` for each node. No GPU is in two ranges, and
    their lengths differ by at most one GPU.

    With fewer GPUs than nodes, no node gets any, and all nodes run on the CPU: NCCL refuses two ranks on one GPU, and
    a plan that mixes GPUs with the CPU is slower than the GPUs alone.
    """
    if len(gpus) < count:
        return [[] for _ in range(count)]
    return [list(gpus[len(gpus) * index // count : len(gpus) * (index + 1) // count]) for index in range(count)]


def check_gpus(count: int, device: str, environ: Mapping[str, str]) -> list[str]:
    """Check that `count` virtual nodes get the devices that they are asked to use.

    Args:
        device: `cluster.device`: auto, cpu or cuda.

    Returns:
        A warning, as lines, if this machine has GPUs and its virtual nodes run on the CPU because they are too many.

    Raises:
        InputError: `device` is cuda, and there are fewer GPUs than nodes.
    """
    gpus = [] if device == "cpu" else local_gpus(environ)
    if len(gpus) >= count or (device == "auto" and not gpus) or device == "cpu":
        return []
    few = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'} for {count} virtual nodes"
    most = f"at most {len(gpus)} virtual node{'' if len(gpus) == 1 else 's'}"
    if device == "cuda":
        raise InputError(f"device cuda: found {few}; allowed here: {most if gpus else 'device auto'}, or device cpu")
    return [f"{few}: all nodes run on the CPU, with gloo; {most} can have a GPU each"]


@dataclass(frozen=True)
class LocalNodes:
    """Virtual nodes of this machine that work on one folder: of a run, or of a probe."""

    folder: Path
    nodes: Sequence[str]
    """Names of the nodes: local0, local1, …"""
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

        Raises:
            CommandError: the process cannot be started.
            OSError: the log cannot be opened.
        """
        words = program("hpctrain.node") if self.run is None else python_command(self.run, "hpctrain.node")
        argv = [*words, verb, "--folder", str(self.folder), "--node", node]
        argv += ["--nodes", str(NodeSet.fromlist(list(self.nodes))), "--local"]
        # A child passes --parent because its parent could have died already, and getppid would then name another
        # process.
        argv += ["--parent", str(os.getpid()), *extra]
        argv = argv if self.run is None else container_command(self.run, self.folder, argv)
        env = local_environment(len(self.nodes))
        if self._gpus:
            share = share_gpus(self._gpus, len(self.nodes))[self.nodes.index(node)]
            env |= dict.fromkeys(VISIBLE_VARIABLES, ",".join(share) or NO_GPU)
        return self.runner.start(argv, env=env, log=log, keep_fds=keep_fds)

    @cached_property
    def _gpus(self) -> list[str]:
        return local_gpus(os.environ)
