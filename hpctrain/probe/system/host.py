"""Reads facts about this machine: interfaces, addresses, processor, memory and its errors, CPU quotas.

The module reads sysfs, procfs and cgroups, without root. A figure that the machine hides is None.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from hpctrain.base.errors import InputError
from hpctrain.base.system.core_sets import parse_cpus
from hpctrain.base.system.job_share import job_memory_bytes, usable_cpus
from hpctrain.base.system.kernel import cgroup_folders, kernel_number, kernel_text
from hpctrain.records.topology.evidence import HostFacts

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UNLIMITED = 2**60
"""A memory limit in bytes from this number on means no limit: cgroup v1 writes a number near 2**63."""
SYSFS = Path("/sys")
Periods = tuple[int, int]
"""(enforcement periods of a CPU quota so far, those of them in which the cgroup had used up the quota)"""


def host_facts(hostname: str, infiniband: Path = Path("/sys/class/infiniband")) -> HostFacts:
    """Return the facts of this machine, without its clock offset, which pairs of nodes measure.

    Args:
        hostname: the machine's own host name. To resolve it takes as long as the name servers need.
        infiniband: the kernel's folder of InfiniBand devices.
    """
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return HostFacts(
        kernel=platform.release() or None,
        boot_id=kernel_text(_BOOT_ID),
        cpus=usable_cpus(),
        memory_bytes=memory_limit_bytes(),
        interfaces={name: addresses for name, addresses in sorted(_addresses().items()) if name in up},
        mtu={name: state.mtu for name, state in sorted(psutil.net_if_stats().items()) if name in up and state.mtu > 0},
        infiniband=active_ports(infiniband),
        hostname_resolves_to=resolve(hostname),
    )


def resolve(hostname: str) -> str | None:
    """Return the first address that a host name resolves to, which is the one that libraries such as Gloo listen on;
    None when it cannot be resolved."""
    try:
        return str(socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def active_ports(infiniband: Path) -> list[str]:
    """Return the InfiniBand and RoCE ports that are up, as 'mlx5_0/1' (device and port); unreadable ones are skipped.

    Args:
        infiniband: the kernel's folder of InfiniBand devices.
    """
    states = {file: kernel_text(file) or "" for file in sorted(infiniband.glob("*/ports/*/state"))}
    return [
        f"{file.parts[-4]}/{file.parts[-2]}"
        for file, state in states.items()
        if state.partition(":")[2].strip() == "ACTIVE"
    ]


def _addresses() -> dict[str, list[str]]:
    addresses: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = entry.address.partition("%")[0]
            # Every interface has a link-local IPv6 address; it does not show where the interface leads.
            if not ipaddress.ip_address(address).is_link_local:
                addresses.setdefault(name, []).append(address)
    return addresses


def routed_address(peer: str) -> str:
    """Return the address of this machine from which packets to `peer` leave, by the routing table and not by the host
    name.

    A host name often resolves to 127.0.0.1 or to a management network. Nothing is sent.

    Raises:
        InputError: the peer's name is unknown, no route leads there, or only loopback does.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(target)
            address = str(sock.getsockname()[0])
    except OSError as error:
        raise InputError(
            f"{peer}: no route to this node ({error.strerror or error}); name the address to use with --addr"
        ) from None
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise InputError(f"{peer}: only loopback ({address}) leads there; name the address to use with --addr")
    return address


def interface_of(addr: str) -> str | None:
    """Return the name of this machine's network interface that has the address; None when there is none."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == addr for entry in entries):
            return str(name)
    # The loopback interface answers for all of 127.0.0.0/8 and lists only 127.0.0.1.
    return "lo" if addr.startswith("127.") and "lo" in psutil.net_if_addrs() else None


def own_address(sock: socket.socket) -> str:
    """Return the address of this end of a connection, as the kernel chose it. An IPv4-mapped IPv6 address
    (::ffff:10.0.0.1) is returned as IPv4."""
    address = ipaddress.ip_address(str(sock.getsockname()[0]).partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the processor; if there is none, the name of the architecture."""
    for line in (kernel_text(cpuinfo) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "cpu"


def usable_memory_bytes() -> int:
    """Return the bytes of memory that this process may still take: those free on the machine, those left in its cgroup,
    or those that Slurm gave its job, whichever are fewest."""
    rooms = (int(psutil.virtual_memory().available), cgroup_memory_room(), job_memory_bytes())
    return min(room for room in rooms if room is not None)


def memory_limit_bytes() -> int:
    """Return the bytes of memory that all processes of the job together may take on this machine: all memory of the
    machine, the limit of the cgroup, or what Slurm gave the job, whichever is least."""
    limits = [limit for limit, _ in _cgroup_memory()]
    return min(limit for limit in (int(psutil.virtual_memory().total), job_memory_bytes(), *limits) if limit)


def cgroup_memory_room(process: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that this process may still take: the least that any memory limit of its cgroup and of the
    cgroups above it leaves; None without a limit."""
    return min((max(0, limit - usage) for limit, usage in _cgroup_memory(process, mount)), default=None)


def _cgroup_memory(
    process: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[int, int]]:
    """Yield (limit, usage) in bytes for each memory limit of this process's cgroup and of the cgroups above it."""
    for folder, version in cgroup_folders("memory", process, mount):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
        limit, usage = (kernel_number(folder / name) for name in names)
        if limit is not None and limit < _UNLIMITED:
            yield limit, usage or 0


def memory_errors(sysfs: Path = SYSFS) -> int | None:
    """Return the number of uncorrectable memory errors since the machine started (EDAC); None where they are not
    counted."""
    return _sum(sysfs.glob("devices/system/edac/mc/mc*/ue_count"))


def quota_periods(proc: Path = Path("/proc/self"), cgroup: Path = SYSFS / "fs/cgroup") -> dict[Path, Periods]:
    """Return cgroup folder -> (number of its quota periods, number of those in which the quota stopped the cgroup), for
    each CPU quota of this process's cgroup and the cgroups above it, from cpu.stat of cgroup v1 or v2.

    The cgroups above count, because Slurm sets the limit of a job at the cgroup above those of its job steps. Empty
    when there is no quota, or when none can be read.
    """
    folders = (folder for folder, _ in cgroup_folders("cpu", proc / "cgroup", cgroup))
    return {folder: periods for folder in folders if (periods := _periods(folder / "cpu.stat"))}


def is_held_by_quota(before: dict[Path, Periods], after: dict[Path, Periods]) -> bool:
    """Return whether a CPU quota stopped one of the cgroups in at least a quarter of the periods between `before` and
    `after`, two results of `quota_periods`."""
    for group, (periods, held) in after.items():
        then = before.get(group, (0, 0))
        if periods > then[0] and 4 * (held - then[1]) >= periods - then[0]:
            return True
    return False


def _periods(file: Path) -> Periods | None:
    """Return the counts of quota periods in a cpu.stat file: (all, throttled). None without a quota, because the kernel
    then counts no periods."""
    try:
        counts = dict(line.split() for line in (kernel_text(file) or "").splitlines())
        periods = (int(counts["nr_periods"]), int(counts["nr_throttled"]))
    except (ValueError, KeyError):
        return None
    return periods if periods[0] else None


def own_numa_node(allowed: Iterable[int] | None = None, sysfs: Path = SYSFS) -> int | None:
    """Return the NUMA node of all CPUs that this process may use; None when they are on several NUMA nodes.

    Args:
        allowed: numbers of the CPUs; None for those of this process.
    """
    wanted = set(os.sched_getaffinity(0) if allowed is None else allowed)
    for folder in sorted(sysfs.glob("devices/system/node/node[0-9]*")):
        try:
            processors = set(parse_cpus(kernel_text(folder / "cpulist") or ""))
        except ValueError:
            continue
        if wanted and wanted <= processors:
            return int(folder.name.removeprefix("node"))
    return None


def _sum(files: Iterable[Path]) -> int | None:
    counts = [count for file in files if (count := kernel_number(file)) is not None]
    return sum(counts) if counts else None
