"""Which CPUs a worker uses and how many threads it has, as variables of its environment."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.base.system.core_sets import THREADS, core_set_environment
from hpctrain.base.system.job_share import usable_cpus
from hpctrain.node.probe import NodeAddress
from hpctrain.records.topology.topology import Topology


def share_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return {OMP_NUM_THREADS: number} that keeps a process to the CPUs which Slurm gave its job; {} if the kernel does
    so already, or if `env` has the variable."""
    cpus = usable_cpus(env)
    return {} if env.get(THREADS) or cpus >= usable_cpus({}) else {THREADS: str(cpus)}


def thread_environment(topology: Topology, here: NodeAddress, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that divide the CPUs among the workers of the node: core sets for CPU devices,
    and an equal share of the threads for GPUs, unless `env` has a number of threads; {} if the node has a single
    device, because torch then uses all cores.

    Args:
        here: the node as its options name it.
        env: the workers' environment.
    """
    devices = [device for entry in topology.nodes if entry.id == here.node for device in entry.devices]
    on_cpu = all(topology.device_types[device.type].kind == "cpu" for device in devices)
    return core_set_environment(len(devices), here.core_sets(len(devices)) if on_cpu else [], env)
