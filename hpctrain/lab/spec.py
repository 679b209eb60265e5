"""The lab's spec file: which virtual nodes, links, switches and partitions `hpctrain lab up` builds."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator

from hpctrain.base.errors import FieldError, FileError
from hpctrain.records.format.document import Document, Part
from hpctrain.records.format.node_name import compress_node_set, expand_node_set
from hpctrain.records.format.validation_errors import validation_errors
from hpctrain.records.format.yaml_file import read_yaml

BENCHMARKING = IPv4Network("198.18.0.0/15")
"""Network within which a lab's network lies: addresses reserved for measuring network equipment (RFC 2544, appendix
C.2.2), which no other network uses."""

FIRST_NODE = 10
"""Index of the first node's address in the lab's network: 198.18.7.10 in 198.18.7.0/24. The controller's has index
1."""

_RATE = re.compile(r"^(\d+(?:\.\d+)?)(kbit|mbit|gbit)$")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_WALL_TIME = r"^(UNLIMITED|INFINITE|(\d+-)?\d+(:\d+){0,2})$"
# Slurm's configuration cannot quote a path, and an entry of PATH cannot hold a colon.
_FOLDER = r"^/[^\s#%,=:]*[^\s#%,=:/]$"
_NODE_NAME = r"^[a-z][a-z0-9-]{0,30}$"


def rate_bits_per_s(rate: str) -> float:
    """Return the bits per second of a link rate in tc's notation: '100mbit' -> 1e8.

    Raises:
        ValueError: the text is no rate, or the rate is below 8kbit.
    """
    match = _RATE.match(rate)
    if match is None:
        raise ValueError("allowed: a number with kbit, mbit or gbit, for instance 100mbit")
    bits = float(match[1]) * _BITS[match[2]]
    if bits < 8e3:
        raise ValueError("at least 8kbit; `hpctrain lab cut` stops traffic altogether")
    return bits


def _checked_rate(value: Any) -> Any:
    if isinstance(value, str):
        rate_bits_per_s(value)
    return value


def _names(value: Any) -> Any:
    """Return the node names that 'node[0-2]', or a list of such texts, stands for; any other value is returned
    unchanged.

    Raises:
        ValueError: a text is no node name and no node set.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return value
    try:
        return [name for text in texts for name in expand_node_set(text)]
    except ValueError as error:
        raise ValueError(f"{error}; allowed: node names, or a set of them such as node[0-2]") from None


def _minutes(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Rate = Annotated[str, BeforeValidator(_checked_rate)]
WallTime = Annotated[
    str, BeforeValidator(_minutes), Field(pattern=_WALL_TIME, json_schema_extra={"type": ["string", "integer"]})
]
Names = Annotated[
    list[str], BeforeValidator(_names), Field(min_length=1, json_schema_extra={"type": ["array", "string"]})
]


class LabNode(Part):
    """A virtual node: a network namespace with its own host name, address and slurmd."""

    name: str = Field(pattern=_NODE_NAME)
    """Name of the node: its host name, and its name in Slurm."""
    cpus: int | None = Field(default=None, ge=1, le=1024)
    """Number of CPUs that slurm.conf states for the node. Default: `cpus` of the spec."""
    memory_bytes: int | None = Field(default=None, ge=2**20)
    """Memory that slurm.conf states for the node, in bytes. Default: `memory_bytes` of the spec."""
    rate: Rate | None = None
    """Rate of the node's link in each direction, such as 100mbit. Default: `rate` of the spec."""
    cpu_share: float | None = Field(default=None, ge=0.01)
    """CPU time that all processes of the node may use together, in cores: 0.5 is half a core. Default: `cpu_share` of
    the spec."""


class LabSwitch(Part):
    """A virtual switch, connected to the root switch by one link, the uplink."""

    nodes: Names
    """The nodes at this switch, as a list or as 'node[0-1]'. Nodes at no switch are at the root switch."""
    uplink_rate: Rate | None = None
    """Rate of the uplink in each direction. Default: no limit."""


class LabPartition(Part):
    """A Slurm partition."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,30}$")
    """Name of the partition."""
    nodes: Names | None = None
    """Nodes of the partition. Default: all nodes."""
    default: bool = False
    """Whether jobs that name no partition go into this one; exactly one partition has `default: true`."""
    priority_tier: int = Field(default=1, ge=0, le=65533)
    """Jobs of a partition with a higher tier preempt those of one with a lower tier."""
    preempt_mode: Literal["requeue", "cancel", "off"] = "requeue"
    """What Slurm does with a preempted job of this partition: `requeue` or `cancel`. `off`: its jobs are never
    preempted."""
    grace_time_s: int = Field(default=0, ge=0)
    """Seconds between the notice of a preemption and the end of the job."""
    max_time: WallTime = "UNLIMITED"
    """Longest wall time of a job, as Slurm writes it: 30 (minutes), 1:30:00, 2-0."""
    default_time: WallTime | None = None
    """Wall time of a job that asks for none. Default: `max_time`."""


class LabSlurm(Part):
    """Settings of the lab's Slurm. With the defaults, Slurm reacts to faults within seconds instead of minutes."""

    prefix: str | None = Field(default=None, pattern=_FOLDER)
    """Folder with bin, sbin and lib/slurm of the Slurm to run. Default: the programs on the PATH."""
    preempt_send_user_signal: bool = True
    """Whether a preempted job gets the signal that it requested with --signal. Clusters differ in this setting."""
    slurmd_timeout_s: int = Field(default=10, ge=2)
    """Seconds without an answer after which Slurm sets a node down (Slurm's own default is 300)."""
    cred_expire_s: int = Field(default=10, ge=5)
    """Seconds that a job's credential is valid; a requeued job waits that long before it starts (Slurm's own default is
    120)."""
    kill_wait_s: int = Field(default=5, ge=1)
    """Seconds between SIGTERM and SIGKILL at a time limit."""
    over_time_limit_min: int = Field(default=0, ge=0)
    """Minutes that a job may run over its time limit."""


def _default_nodes() -> list[LabNode]:
    return [LabNode(name=f"node{index}") for index in range(4)]


def _default_partitions() -> list[LabPartition]:
    return [
        LabPartition(name="low", default=True, priority_tier=1, preempt_mode="requeue", grace_time_s=10),
        LabPartition(name="high", priority_tier=10, preempt_mode="off"),
    ]


class LabSpec(Document):
    """The spec of a lab: a real Slurm of several virtual nodes on one machine."""

    schema_kind: ClassVar[str] = "lab"

    network: str = Field(default="198.18.7.0/24", validate_default=True)
    """IPv4 network of the lab, within 198.18.0.0/15."""
    nodes: list[LabNode] = Field(
        default_factory=_default_nodes, min_length=1, json_schema_extra={"type": ["array", "integer"]}
    )
    """The nodes: their number (they are then called node0, node1, …), or a list. Default: 4 nodes."""
    cpus: int = Field(default=2, ge=1, le=1024)
    """Number of CPUs of each node without its own `cpus`."""
    memory_bytes: int = Field(default=4 * 2**30, ge=2**20)
    """Memory in bytes of each node without its own `memory_bytes`."""
    rate: Rate | None = "1gbit"
    """Link rate, in each direction, of each node without its own `rate`; null: no limit."""
    cpu_share: float | None = Field(default=None, ge=0.01)
    """CPU time, in cores, of each node without its own `cpu_share`; null: no limit."""
    switches: list[LabSwitch] = []
    """Switches below the root switch. Default: every node is at the root switch."""
    partitions: list[LabPartition] = Field(default_factory=_default_partitions, min_length=1)
    """Slurm's partitions. Default: low, whose jobs are preempted and requeued, and high, whose jobs preempt them."""
    slurm: LabSlurm = LabSlurm()
    """Settings of the lab's Slurm."""

    @field_validator("network")
    @classmethod
    def _network(cls, value: str) -> str:
        try:
            inside = IPv4Network(value).subnet_of(BENCHMARKING)
        except ValueError:
            raise ValueError(f"allowed: a network within {BENCHMARKING}, for instance 198.18.7.0/24") from None
        if not inside:
            raise ValueError(f"allowed: a network within {BENCHMARKING}, which is in use nowhere else")
        return value

    @field_validator("nodes", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if not 1 <= value <= 500:
            raise ValueError("allowed: 1 to 500 nodes, as a number or a list")
        return [{"name": f"node{index}"} for index in range(value)]

    @field_validator("nodes")
    @classmethod
    def _nodes(cls, value: list[LabNode], info: ValidationInfo) -> list[LabNode]:
        _no_twice([node.name for node in value], "nodes")
        room = IPv4Network(info.data["network"]).num_addresses - FIRST_NODE - 1 if "network" in info.data else 500
        if len(value) > room:
            raise ValueError(f"the network has room for {max(0, room)} nodes; make it larger (network: 198.18.0.0/16)")
        return value

    @field_validator("switches")
    @classmethod
    def _switches(cls, value: list[LabSwitch], info: ValidationInfo) -> list[LabSwitch]:
        named = [name for switch in value for name in switch.nodes]
        _known(named, info)
        _no_twice(named, "switches")
        return value

    @field_validator("partitions")
    @classmethod
    def _partitions(cls, value: list[LabPartition], info: ValidationInfo) -> list[LabPartition]:
        _no_twice([partition.name.lower() for partition in value], "partitions")
        _known([name for partition in value for name in partition.nodes or []], info)
        if sum(partition.default for partition in value) != 1:
            raise ValueError("exactly one partition must have `default: true`")
        return value

    def address(self, index: int) -> IPv4Address:
        """Return the address of the node at this index of `nodes`."""
        return IPv4Network(self.network).network_address + FIRST_NODE + index

    def controller(self) -> IPv4Address:
        """Return this machine's address in the lab's network, where slurmctld runs."""
        return IPv4Network(self.network).network_address + 1

    def rate_of(self, node: LabNode) -> str | None:
        """Return the rate of the node's link, such as 100mbit; None if it is not limited."""
        return node.rate or self.rate

    def cpu_share_of(self, node: LabNode) -> float | None:
        """Return the node's CPU share in cores; None if it is not limited."""
        return node.cpu_share or self.cpu_share


def _no_twice(names: list[str], where: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)}: named twice among the {where}")


def _known(names: list[str], info: ValidationInfo) -> None:
    if "nodes" not in info.data:
        return  # the list of nodes is wrong, which another error reports
    nodes = [node.name for node in info.data["nodes"]]
    unknown = [name for name in names if name not in nodes]
    if unknown:
        raise ValueError(f"no node is called {', '.join(unknown)}; there are: {compress_node_set(nodes)}")


def read_lab_spec(path: Path) -> LabSpec:
    """Return the lab spec in a YAML file; an error lists every mistake with its line.

    Raises:
        FileError: the file is missing, is no YAML, or is wrong.
    """
    if not path.is_file():
        raise FileError(path, [FieldError("", "no such file; `hpctrain lab up --nodes N` needs none")])
    file = read_yaml(path)
    if not isinstance(file.value, dict):
        raise FileError(path, [FieldError("", "found no keys; a lab of four nodes is `nodes: 4`", 1)])
    try:
        return LabSpec.model_validate(file.value)
    except ValidationError as error:
        raise FileError(path, validation_errors(error, LabSpec, file.lines)) from None
