"""The `cluster` section of run.yaml: where a run takes place, and what its job requests from Slurm. Also site.yaml, in
which a user writes defaults for this section once for each Slurm cluster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hpctrain.records.format.document import Document, OneOrSeveral, Part
from hpctrain.records.format.node_name import NODES_MAX, compress_node_set, expand_node_set
from hpctrain.records.format.yaml_file import read_yaml_model

MailType = Literal["BEGIN", "END", "FAIL", "REQUEUE", "INVALID_DEPEND", "TIME_LIMIT", "TIME_LIMIT_80", "ALL"]

CPU_DEVICES_MAX = 64
"""Most devices into which the CPUs of a node are cut."""

_FEATURES = r"^[A-Za-z0-9_.:=+&|,()\[\]*-]+$"
_WORD = r"^[A-Za-z0-9_.:+-]+$"


class Mail(Part):
    """Mail that Slurm itself sends about the job."""

    user: str | None = Field(default=None, pattern=r"^[^\s,]+$")
    """Mail address. Default: the address to which Slurm sends mail for the user who submits."""
    on: list[MailType] = Field(default=["END", "FAIL", "REQUEUE"], min_length=1)
    """Events that cause a mail: BEGIN, END, FAIL, REQUEUE, INVALID_DEPEND, TIME_LIMIT, TIME_LIMIT_80, ALL."""


class NodeGroup(Part):
    """Nodes of one kind, in a job with several kinds of nodes."""

    constraint: str = Field(pattern=r"^[A-Za-z0-9_.:=+-]+(&[A-Za-z0-9_.:=+-]+)*$")
    """Slurm features that each node of this kind has: a100, or a100&nvlink for nodes with both."""
    nodes: int = Field(ge=1, le=NODES_MAX)
    """Number of nodes of this kind."""


class Cluster(Part):
    """Where the run takes place, and what its job requests from Slurm."""

    kind: Literal["local", "slurm"] = "local"
    """local: processes on this machine, each a virtual node. slurm: one Slurm job."""
    partition: str | None = None
    """Slurm partition, or several separated by commas. Default: hpctrain chooses the best one and prints it."""
    account: str | None = None
    """Slurm account to which the job is charged."""
    qos: str | None = None
    """Slurm quality of service."""
    reservation: str | None = None
    """Slurm reservation that the job runs in."""
    constraint: str | None = Field(default=None, pattern=_FEATURES)
    """Features that every node has, in Slurm's form: a100, a100&nvlink (both), a100|h100 (either)."""
    nodelist: str | None = None
    """Node set that the job must get: node[1-4]. A job of more nodes gets others besides."""
    exclude: str | None = None
    """Node set that the job must not get: node3,node[7-9]."""
    groups: list[NodeGroup] = []
    """Nodes of several kinds in one job, each kind with a constraint and a number; `nodes` is their sum."""
    time: str | None = Field(default=None, json_schema_extra={"type": ["string", "integer", "null"]})
    """Time limit in Slurm's form: 90 is 90 minutes, 1:30:00 one and a half hours, 2-00:00:00 two days. Default: the
    limit that the partition gives to jobs without one."""
    save_notice_s: int = Field(default=120, ge=1, le=65535)
    """Seconds before the time limit when the agents are asked to save a checkpoint and stop."""
    nodes: str = Field(default="1", json_schema_extra={"type": ["string", "integer"]})
    """Number of nodes ('4'), or the fewest and the most nodes that the run can use ('3-4'). Default: the number of
    nodes in `groups` or `nodelist`, else 1."""
    devices_per_node: int | None = Field(default=None, ge=1, le=1024)
    """Devices used on each node. Default: all of them. A node without GPUs is cut into this many devices (at most 64),
    each with a part of the CPUs; default: one device with all CPUs."""
    gpu_type: str | None = Field(default=None, pattern=_WORD)
    """Type of the GPUs that the run uses, by Slurm's name (`sinfo -o %G`). Default: any."""
    exclusive: bool | Literal["auto"] = "auto"
    """Whether the job has its nodes to itself. true: whole nodes. false: a part of each node, that is
    `devices_per_node` GPUs with their share of the node's CPUs and memory. auto: a part if `devices_per_node` is fewer
    than the nodes have, else whole nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device. auto: CUDA devices where there are any, else the CPU."""
    after: list[str] = Field(default=[], json_schema_extra={"type": ["array", "string"]})
    """Runs (folder, name or job id) or ids of any Slurm jobs that must end before the job of this run starts."""
    after_end: Literal["ok", "any"] = "ok"
    """How the runs and jobs in `after` must end. ok: without an error. any: in any way."""
    mail: Mail | None = None
    """Mail that Slurm itself sends about the job. Default: none."""
    internet: bool = True
    """Whether the nodes reach the internet. false: Hugging Face libraries use only files on disk and do not wait."""
    sbatch: list[str] = []
    """Further options of sbatch, each as on sbatch's command line."""
    setup: list[str] = []
    """Shell lines that run on each node before anything else of the run, such as module load."""

    @field_validator("nodes", "time", mode="before")
    @classmethod
    def _number_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("exclusive", mode="before")
    @classmethod
    def _whole_or_part(cls, value: Any) -> Any:
        if not isinstance(value, bool) and value != "auto":
            raise ValueError("allowed: auto, true, false")
        return value

    @field_validator("nodes")
    @classmethod
    def _node_range(cls, value: str) -> str:
        form = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", value)
        if form is None:
            raise ValueError("allowed: a number ('4') or a range ('3-4')")
        low, high = int(form[1]), int(form[2] or form[1])
        if low < 1 or high < low:
            raise ValueError("at least one node, and the second number not below the first")
        if high > NODES_MAX:
            raise ValueError(f"allowed: up to {NODES_MAX} nodes")
        return value

    @field_validator("nodelist", "exclude")
    @classmethod
    def _node_set(cls, value: str | None) -> str | None:
        if value is not None and not expand_node_set(value):
            raise ValueError("it names no node; allowed: a node set, as node[1-4] or a,b")
        return value

    @field_validator("after", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        values = [value] if isinstance(value, (str, int)) and not isinstance(value, bool) else value
        if not isinstance(values, list):
            return values
        return [str(item) if isinstance(item, int) and not isinstance(item, bool) else item for item in values]

    @model_validator(mode="before")
    @classmethod
    def _count_nodes(cls, value: Any) -> Any:
        """Return the section's raw value. If it has no `nodes`, add it: the sum of the groups' nodes, or without groups
        the number of nodes in `nodelist`.
        """
        if not isinstance(value, dict) or "nodes" in value:
            return value
        groups, names = value.get("groups"), value.get("nodelist")
        if not groups and isinstance(names, str):
            try:
                return {**value, "nodes": str(len(expand_node_set(names)) or 1)}
            except ValueError:
                return value  # the check of the field reports it
        if not groups or not isinstance(groups, list):
            return value
        counts = [group.get("nodes") if isinstance(group, dict) else getattr(group, "nodes", None) for group in groups]
        if not all(isinstance(count, int) for count in counts):
            return value
        return {**value, "nodes": str(sum(count for count in counts if count))}

    @model_validator(mode="after")
    def _nodelist_fits(self) -> Cluster:
        names, most = expand_node_set(self.nodelist or ""), self.node_range[1]
        if len(names) > most:
            raise ValueError(
                f"nodelist names {len(names)} nodes, and nodes is {self.nodes}; name fewer, or raise nodes"
            )
        both = sorted({*names} & {*expand_node_set(self.exclude or "")})
        if both:
            raise ValueError(f"nodelist and exclude both name {compress_node_set(both)}; take it out of one of them")
        return self

    @model_validator(mode="after")
    def _cpu_devices_fit(self) -> Cluster:
        if self.device == "cpu" and (self.devices_per_node or 1) > CPU_DEVICES_MAX:
            raise ValueError(
                f"devices_per_node is {self.devices_per_node}; with device: cpu, allowed: 1 to {CPU_DEVICES_MAX}"
            )
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> Cluster:
        if not self.groups:
            return self
        if self.constraint is not None:
            raise ValueError("constraint and groups exclude each other; write the constraint into each group")
        total = sum(group.nodes for group in self.groups)
        if self.node_range != (total, total):
            raise ValueError(f"nodes is {self.nodes}, and the groups have {total}; leave nodes out")
        return self

    @property
    def node_range(self) -> tuple[int, int]:
        """Return (fewest, most) nodes that the run can use: (3, 4) for '3-4', (4, 4) for '4'."""
        low, _, high = self.nodes.partition("-")
        return int(low), int(high or low)


FILE = Path("hpctrain") / "site.yaml"
"""Path of site.yaml below $XDG_CONFIG_HOME, by default ~/.config (XDG Base Directory Specification)."""
RUN_ONLY_KEYS = ("after", "after_end", "nodes", "nodelist", "groups", "time")
"""Keys of `cluster` that belong to a single run; site.yaml may not set them."""


class SiteProfile(Part):
    """A user's defaults for the `cluster` section of run files on one Slurm cluster."""

    match: OneOrSeveral[str] = Field(default=[], json_schema_extra={"type": ["array", "string"]})
    """Clusters that the profile is for: Slurm's names of clusters (ClusterName) or names of login hosts, with * for any
    text. Default: any cluster."""
    cluster: Cluster
    """Values for keys that the `cluster` section of a run file leaves out."""

    @field_validator("cluster")
    @classmethod
    def _of_the_site(cls, value: Cluster) -> Cluster:
        run_only = [key for key in RUN_ONLY_KEYS if key in value.model_fields_set]
        if run_only:
            raise ValueError(
                f"{run_only[0]} belongs into a run file; here go partition, account, qos, setup and the like"
            )
        return value

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the values that the profile sets, in the form of a run file: {"cluster": {key: value}}."""
        return {"cluster": self.cluster.model_dump(mode="json", by_alias=True, exclude_unset=True)}


class Site(Document):
    """site.yaml: a user's defaults for the `cluster` section of run files, with a profile for each Slurm cluster."""

    schema_kind: ClassVar[str] = "site"

    profiles: dict[str, SiteProfile] = Field(min_length=1)
    """Name of a profile -> profile. If several match the cluster, the first one is used."""

    def matching(self, names: Sequence[str]) -> str | None:
        """Return the name of the first profile that matches one of `names` (the names of a cluster and its login host);
        None if no profile matches. A profile without `match` matches every cluster."""
        for name, profile in self.profiles.items():
            if not profile.match or any(fnmatchcase(here, form) for here in names for form in profile.match):
                return name
        return None


def site_file(environ: Mapping[str, str]) -> Path:
    """Return the path at which this user's site.yaml belongs, by XDG_CONFIG_HOME or HOME in `environ`. The file may not
    exist."""
    base = environ.get("XDG_CONFIG_HOME") or ""
    # The specification requires that relative paths are ignored.
    return (Path(base) if base.startswith("/") else Path(environ.get("HOME", "~")).expanduser() / ".config") / FILE


def read_site(path: Path) -> Site | None:
    """Return the content of site.yaml; None if the file does not exist.

    Raises:
        FileError: the file is not YAML, or has errors; all are listed with their lines.
    """
    if not path.exists():
        return None
    return read_yaml_model(path, Site, "profiles: {NAME: {match: …, cluster: {…}}}")
