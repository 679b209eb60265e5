"""What the facts about a machine mean for a run. Pure: from facts to findings, subject by subject."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from hpctrain.base.units import format_bytes, format_si
from hpctrain.doctor.account_findings import environment_findings, home_finding
from hpctrain.doctor.cluster_findings import slurm_findings
from hpctrain.doctor.facts import (
    DoctorFinding,
    Driver,
    FolderFacts,
    Interface,
    LocalDisk,
    MachineFacts,
    NetworkFacts,
    SlurmFacts,
    TorchFacts,
    TorchUnavailable,
)
from hpctrain.runs.file_system import IN_MEMORY, is_shared
from hpctrain.slurm.cluster import gpu_count

LITTLE_BYTES = 10 * 2**30
"""Free bytes of a disk below which the doctor warns. Nine checkpoints of a model of 1e8 parameters fill them (12 bytes
a parameter, fp32 Adam)."""
_container = partial(DoctorFinding, "containers")
_torch = partial(DoctorFinding, "torch")
_network = partial(DoctorFinding, "network")
_file = partial(DoctorFinding, "files")
_LOCKS_OF_ONE_NODE = ("nolock", "local_lock=all", "local_lock=flock", "localflock")
"""Mount options of NFS and Lustre that make locks invisible to other nodes."""


def findings_of(facts: MachineFacts) -> list[DoctorFinding]:
    """Return all findings that follow from the facts."""
    slurm = facts.slurm if isinstance(facts.slurm, SlurmFacts) else None
    elsewhere = slurm is not None and any(node.name != facts.host for node in slurm.nodes)
    return [
        *slurm_findings(facts.slurm),
        *container_findings(facts.containers, slurm.pyxis if slurm else None),
        *environment_findings(facts.environment, elsewhere),
        *torch_findings(facts.torch, facts.driver, sum(gpu_count(node.gres) for node in slurm.nodes) if slurm else 0),
        *network_findings(facts.network),
        *folder_findings(facts.runs, elsewhere),
        home_finding(facts.home),
        *_local_disks(facts.local_disks),
    ]


def container_findings(runtimes: Mapping[str, str | None], pyxis: bool | None) -> list[DoctorFinding]:
    """Return findings about container runtimes and pyxis. The level is `note` for a missing runtime and for one that
    does not run, else `ok`.

    Args:
        runtimes: program on the path -> its version; None for a program that does not run.
        pyxis: whether srun has pyxis; None if there is no Slurm.
    """
    findings = []
    for runtime, version in runtimes.items():
        if version is None:
            words = f"it is on the path, and `{runtime} --version` fails"
            findings.append(_container(runtime, "note", "does not run", words, "load its module again"))
        else:
            findings.append(_container(runtime, "ok", version))
    if not runtimes:
        words = "on this machine; a run needs no container, it uses the Python that submits it"
        findings.append(_container("apptainer, singularity", "note", "not on the path", words))
    if pyxis is not None:
        words = "srun can start containers by itself (--container-image)" if pyxis else "srun starts no containers"
        findings.append(_container("pyxis", "ok", "present" if pyxis else "absent", words))
    return findings


def _built_for(torch: TorchFacts) -> str:
    """Return the platform that torch was built for, as text."""
    if torch.hip_version:
        return f"ROCm {torch.hip_version}"
    return f"CUDA {torch.cuda_version}" if torch.cuda_version else "no CUDA"


def torch_findings(
    torch: TorchFacts | TorchUnavailable, driver: Driver | None, cluster_gpus: int
) -> list[DoctorFinding]:
    """Return findings about torch, gloo, NCCL and NVIDIA's driver.

    Args:
        driver: None if there is no nvidia-smi.
        cluster_gpus: number of GPUs that Slurm lists on the cluster's nodes.
    """
    if isinstance(torch, TorchUnavailable):
        return [_no_torch(torch), *_driver(driver)]
    return [
        _build(torch, driver, cluster_gpus),
        *_driver(driver),
        _gloo(torch.gloo),
        *_nccl(torch),
    ]


def _no_torch(torch: TorchUnavailable) -> DoctorFinding:
    """Return the finding, of level `problem`, that says why torch cannot be used."""
    value = "cannot be used" if torch.installed else "not installed"
    todo = "install torch beside hpctrain, in the Python that the job will use"
    return _torch("torch", "problem", value, f"no run can start: {torch.reason}", todo)


def _build(torch: TorchFacts, driver: Driver | None, cluster_gpus: int) -> DoctorFinding:
    """Return the finding about torch's version, the platform that it was built for, and the GPUs that it can use. Level
    `problem` if torch cannot use this machine's GPUs, or is built for CPUs although the cluster has GPUs; else `ok`.
    """
    build = f"{torch.version}, " + _built_for(torch)
    if torch.devices:
        return _torch("torch", "ok", build, f"can use {_counted(torch.devices)}")
    here = driver is not None and driver.gpus
    if here and torch.cuda_version:
        words = "it can use none of this machine's GPUs, so runs would train on CPUs"
        todo = "look at CUDA_VISIBLE_DEVICES; else install a torch for an older CUDA, or ask for a newer driver"
        return _torch("torch", "problem", build, words, todo)
    if torch.cuda_version or (torch.hip_version and not here):
        return _torch("torch", "ok", build, "there is no GPU on this machine to try it with")
    if here or cluster_gpus:
        whose = "this machine's GPUs" if here else f"the {cluster_gpus} GPUs that Slurm lists"
        todo = "install a torch for CUDA in the Python that the job will use"
        return _torch("torch", "problem", build, f"this build leaves {whose} unused", todo)
    return _torch("torch", "ok", build, "training runs on CPUs")


def _driver(driver: Driver | None) -> list[DoctorFinding]:
    """Return the finding about NVIDIA's driver and its GPUs, as the only item. Level `note` if there is no driver or no
    GPU, or the driver does not answer; else `ok`.
    """
    if driver is None:
        return [_torch("nvidia-smi", "note", "not on the path", "no NVIDIA driver on this machine")]
    if driver.reason:
        return [_torch("nvidia-smi", "note", "fails", driver.reason)]
    if not driver.gpus:
        return [_torch("nvidia-smi", "note", "no GPU", "the driver is here, and lists no GPU")]
    return [_torch("nvidia-smi", "ok", f"driver {driver.version}", _counted(driver.gpus))]


def _gloo(there: bool) -> DoctorFinding:
    """Return the finding that says whether torch has gloo. Level `problem` without gloo, else `ok`."""
    if there:
        return _torch("gloo", "ok", "present", "collectives on CPUs, and the writing of checkpoints")
    words = "no run can start: ranks agree on checkpoints over gloo"
    return _torch("gloo", "problem", "absent", words, "install a torch that is built with gloo")


def _nccl(torch: TorchFacts) -> list[DoctorFinding]:
    """Return the finding about torch's version of NCCL, as the only item. Without NCCL: level `problem` for a torch
    that is built for CUDA, `note` for any other. With NCCL: `ok`.
    """
    if torch.nccl_version is not None:
        return [_torch("NCCL", "ok", torch.nccl_version, "collectives on GPUs")]
    if torch.cuda_version is None:
        return [_torch("NCCL", "note", "absent", "not part of a torch for CPUs")]
    words = "GPUs could not talk to each other"
    return [_torch("NCCL", "problem", "absent", words, "install a torch that is built with NCCL")]


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def network_findings(network: NetworkFacts) -> list[DoctorFinding]:
    """Return findings about each network interface that is up, the interface that collectives use, and exported
    variables. If only loopback is up, a finding of level `note` says so.
    """
    findings = [
        _network(interface.name, "ok", interface.address, _speed(interface)) for interface in network.interfaces
    ]
    if not network.interfaces:
        findings.append(_network("interfaces", "note", "loopback only", "no other machine can be reached"))
    return [*findings, _choice(network), *(_exported(network, variable) for variable in network.exported)]


def _speed(entry: Interface) -> str:
    speed = (
        f"its driver says {format_si(entry.bits_per_s, 'bit/s')}" if entry.bits_per_s else "its driver tells no speed"
    )
    if entry.infiniband:
        return f"IP over InfiniBand, {speed}; NCCL takes InfiniBand itself for the data"
    return f"{speed}; `hpctrain probe` measures"


def _choice(network: NetworkFacts) -> DoctorFinding:
    """Return the finding about the interface that leads to the cluster's nodes. Level `note` if it is not known, else
    `ok`.
    """
    name = "SOCKET_IFNAME"
    if network.peer is None:
        words = "what runs on this machine alone use; hpctrain sets GLOO_SOCKET_IFNAME to it"
        return _network(name, "ok", network.chosen or "", words)
    if network.chosen is None:
        words = f"not known from here ({network.reason}); each node's agent finds its own in the job"
        return _network(name, "note", "not chosen", words)
    words = f"leads from here to node {network.peer}; each node's agent finds its own in the same way and sets "
    words += "GLOO_ and NCCL_SOCKET_IFNAME to it, unless you export them"
    return _network(name, "ok", network.chosen, words)


def _exported(network: NetworkFacts, variable: str) -> DoctorFinding:
    """Return the finding about an exported GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME. Level `problem` if gloo is to use
    an interface that this machine lacks and runs stay on this machine; else `note`, because the value holds on every
    node.
    """
    value = network.exported[variable]
    # gloo takes interface names separated by commas. NCCL takes prefixes of names, and characters that change the
    # match.
    missing = variable.startswith("GLOO") and not set(value.split(",")) <= set(network.known)
    if missing and network.peer is None:
        words = "you exported it, and this machine has no such interface: workers would fail at their start"
        return _network(variable, "problem", value, words, f"unset {variable}")
    words = "you exported it, so it holds on every node in place of what the agent would find"
    if missing:
        return _network(variable, "note", value, f"{words}; this machine has no such interface", f"unset {variable}")
    return _network(variable, "note", value, words)


def folder_findings(runs: FolderFacts, elsewhere: bool) -> list[DoctorFinding]:
    """Return findings about the folder in which run folders are made.

    Args:
        elsewhere: whether jobs run on other machines, which have to see the folder.
    """
    return [
        _place(runs, elsewhere),
        _tried(
            "rename", runs.rename, "a file is replaced at once or not at all", "checkpoints and plans could be torn"
        ),
        _lock(runs, elsewhere),
        _tried("hard link", runs.link, "one name is taken by one agent only", "agents could not agree on who goes on"),
        _free(runs),
    ]


def _place(runs: FolderFacts, elsewhere: bool) -> DoctorFinding:
    """Return the finding about the file system of run folders. If other nodes have to see it: level `problem` for a
    file system in memory, `note` for one that is probably not shared. Else `ok`.

    Args:
        elsewhere: whether jobs run on other machines, which have to see the folder.
    """
    name = "run folders (HPCTRAIN_RUNS)" if runs.from_variable else "run folders (./runs)"
    value, todo = f"{runs.path}: {runs.kind or 'type unknown'}", "set HPCTRAIN_RUNS to a folder that all nodes share"
    if not elsewhere:
        words = "a disk of this machine, which is enough for runs on it"
        return _file(name, "ok", value, "a shared file system" if is_shared(runs.kind) else words)
    if runs.kind in IN_MEMORY:
        words = "it is in this machine's memory, which no node sees; `hpctrain submit` refuses it"
        return _file(name, "problem", value, words, todo)
    if is_shared(runs.kind):
        return _file(name, "ok", value, "a shared file system; that all nodes mount it is seen in the job only")
    words = "as a rule one machine's own disk; a node that does not see it ends the job without a log"
    return _file(name, "note", value, words, todo)


def _tried(name: str, wrong: str, words: str, cost: str) -> DoctorFinding:
    """Return the finding about a file operation of agents that was tried where run folders are made. Level `problem` if
    it failed, else `ok`.

    Args:
        name: name of the finding.
        wrong: what went wrong; '' if nothing did.
        words: the property of the operation that agents rely on.
        cost: what a failure would cost a run.
    """
    if not wrong:
        return _file(name, "ok", "works", f"tried there: {words}")
    todo = "set HPCTRAIN_RUNS to a folder on another file system"
    return _file(name, "problem", "fails", f"{wrong}; {cost}", todo)


def _lock(runs: FolderFacts, elsewhere: bool) -> DoctorFinding:
    """Return the finding about locks of run folders. Level `problem` if the trial failed, `note` if a mount option
    makes locks invisible to other nodes that may use the folder, else `ok`.

    Args:
        elsewhere: whether jobs run on other machines, which have to see the locks.
    """
    local = [option for option in runs.options if option in _LOCKS_OF_ONE_NODE]
    if not runs.lock and elsewhere and local:
        words = (
            f"mounted with {local[0]}: a lock holds on one node only, so a run folder that is in use on another node "
        )
        return _file("lock", "note", "works here", words + "looks free", "never start one run folder twice")
    return _tried("lock", runs.lock, "a run folder has one run at a time", "two runs could write into one folder")


def _free(runs: FolderFacts) -> DoctorFinding:
    """Return the finding about the free space for run folders. Level `note` below `LITTLE_BYTES`, else `ok`."""
    value = f"{format_bytes(runs.free_bytes)} free"
    if runs.free_bytes < LITTLE_BYTES:
        words = "few checkpoints fit (about 12 bytes a parameter each); a full disk ends a run"
        return _file("space", "note", value, words, "free some, or lower checkpoint.keep")
    return _file("space", "ok", value, "on the whole file system; your quota may be less")


def _local_disks(disks: Sequence[LocalDisk]) -> list[DoctorFinding]:
    """Return a finding of level `ok` for each file system that no other node sees."""
    words = "this machine's own: no other node sees it, so never for run folders or data"
    return [
        _file(f"{disk.path}", "ok", f"{disk.kind or 'type unknown'}, {format_bytes(disk.free_bytes)} free", words)
        for disk in disks
    ]
