"""Names, addresses, paths and programs of a lab.

Everything that a lab makes has a name that only labs use, so that leftovers are found by name.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hpctrain.base.errors import InputError
from hpctrain.lab.spec import LabNode, LabSpec
from hpctrain.records.format.node_name import compress_node_set, expand_node_set

DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
CLIENTS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
FOLDER_VARIABLE = "HPCTRAIN_LAB"
DEFAULT_FOLDER = Path("/run/hpctrain-lab")
FABRIC = "hpctfabric"
"""Network namespace that holds the lab's bridges. The host's firewall and forwarding rules do not apply in it."""
CONTROL = "hpctctl"
"""Name of this machine's interface in the lab's network; the interface's alias names the lab's state folder."""
ROOT_BRIDGE = "hpctbr"
NODE_PREFIX = "hpct-"
"""Prefix of the name of a node's network namespace, as in hpct-node0."""
ALIAS = "hpctrain lab "
NODE_INTERFACE = "eth0"
CPU_GROUP = "hpctrain-lab"
# A Unix socket's path has at most 108 bytes (unix(7)), and munged adds a suffix for its lock file.
_LONGEST_FOLDER = 85


@dataclass(frozen=True)
class SlurmInstallation:
    """Where Slurm's programs are: on the PATH, or in the folders bin, sbin and lib/slurm of `prefix`."""

    prefix: Path | None

    def program(self, name: str) -> str:
        """Return the path or name with which to run a program of Slurm, such as slurmd or squeue."""
        if self.prefix is None:
            return name
        return str(self.prefix / ("sbin" if name in DAEMONS else "bin") / name)

    @property
    def plugins(self) -> Path | None:
        """Value of PluginDir in slurm.conf; None: Slurm's default."""
        return None if self.prefix is None else self.prefix / "lib" / "slurm"

    @property
    def slurmd_options(self) -> tuple[str, ...]:
        """Options that make slurmd start the slurmstepd of `prefix`; by default slurmd starts the one at the path of
        its build."""
        return () if self.prefix is None else ("-d", self.program("slurmstepd"))

    def missing(self) -> list[str]:
        """Return the paths that are missing in `prefix`; [] without a prefix, for which `missing_programs` checks the
        PATH."""
        if self.prefix is None:
            return []
        wanted = [Path(self.program(name)) for name in (*DAEMONS, *CLIENTS)]
        return [str(path) for path in (*wanted, self.prefix / "lib" / "slurm") if not path.exists()]

    def exports(self, slurm_conf: Path) -> list[str]:
        """Return shell lines after which Slurm's commands are those of this installation and use the lab.

        Args:
            slurm_conf: path of the lab's slurm.conf.
        """
        path = [] if self.prefix is None else [f'export PATH={shlex.quote(str(self.prefix / "bin"))}:"$PATH"']
        return [*path, f"export SLURM_CONF={slurm_conf}"]


def state_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the lab's state: $HPCTRAIN_LAB, else /run/hpctrain-lab.

    Raises:
        InputError: the path is not absolute, is too long for a socket, or has characters that slurm.conf cannot hold.
    """
    folder = Path(environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)
    if (
        not folder.is_absolute()
        or len(str(folder)) > _LONGEST_FOLDER
        or any(c.isspace() or c in "#%,=" for c in str(folder))
    ):
        raise InputError(
            f"{FOLDER_VARIABLE}={folder}: allowed: an absolute path of at most {_LONGEST_FOLDER} characters, "
            "without spaces and the characters # % , ="
        )
    return folder


def is_own_namespace(name: str) -> bool:
    """Return whether `name` is the name of a network namespace of a lab."""
    return name == FABRIC or name.startswith(NODE_PREFIX)


@dataclass(frozen=True)
class LabLayout:
    """A lab's spec and state folder, and all names and paths that follow from them."""

    folder: Path
    spec: LabSpec

    @property
    def spec_file(self) -> Path:
        """The file with the spec that the lab was built from; its presence marks the folder as a lab's."""
        return spec_file(self.folder)

    @property
    def ready_file(self) -> Path:
        """The file that `lab up` writes once all nodes have answered."""
        return self.folder / "ready"

    @property
    def slurm(self) -> SlurmInstallation:
        """The Slurm that the lab runs."""
        prefix = self.spec.slurm.prefix
        return SlurmInstallation(Path(prefix) if prefix else None)

    @property
    def slurm_conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def task_prolog(self) -> Path:
        """The script that slurmd runs before each task."""
        return self.folder / "task-prolog"

    @property
    def exports(self) -> list[str]:
        """Shell lines after which Slurm's commands use the lab."""
        return self.slurm.exports(self.slurm_conf)

    @property
    def logs(self) -> Path:
        return self.folder / "log"

    @property
    def munge(self) -> Path:
        """Folder of the lab's munge: key, socket, log."""
        return self.folder / "munge"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "socket"

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders of the lab to make, parents first."""
        spools = [self.folder / "spool" / name for name in self.names]
        inner = [self.logs, self.munge, self.folder / "pid", self.folder / "ctld", self.folder / "spool"]
        return (self.folder, *inner, *spools)

    @cached_property
    def names(self) -> list[str]:
        return [node.name for node in self.spec.nodes]

    def require_nodes(self, count: int, option: str, advised: int | None = None) -> None:
        """Raise InputError if the lab has fewer nodes than a command needs.

        Args:
            option: command and option that need them, for the message.
            advised: nodes of the lab that the message advises to start; None: `count`.
        """
        if len(self.names) < count:
            raise InputError(
                f"{option}: the lab has {len(self.names)} nodes and {count} are needed; "
                f"start one with `hpctrain lab up --nodes {advised or count} --replace`"
            )

    def index(self, name: str) -> int:
        """Return the position of a node in the spec, from 0."""
        return self.names.index(name)

    def node(self, name: str) -> LabNode:
        """Return the node's part of the spec."""
        return self.spec.nodes[self.index(name)]

    def namespace(self, name: str) -> str:
        """Return the name of a node's network namespace."""
        return f"{NODE_PREFIX}{name}"

    def port(self, name: str) -> str:
        """Return the name of the bridge's end of a node's link, an interface in the namespace `FABRIC`."""
        return f"hpctv{self.index(name)}"

    def address(self, name: str) -> str:
        """Return the node's IPv4 address in the lab's network."""
        return str(self.spec.address(self.index(name)))

    def bridge(self, name: str) -> str:
        """Return the name of the bridge to which a node is connected: its switch, or the root switch."""
        for index, switch in enumerate(self.spec.switches):
            if name in switch.nodes:
                return f"hpctsw{index}"
        return ROOT_BRIDGE

    def find(self, texts: Iterable[str]) -> list[str]:
        """Return the names of the nodes that the texts name, each once.

        Args:
            texts: names of nodes, node sets such as node[0-2], or 'all'.

        Raises:
            InputError: a text is no name of a node and no node set, or the lab has no such node.
        """
        names: list[str] = []
        for text in texts:
            try:
                names += self.names if text == "all" else expand_node_set(text)
            except ValueError:
                raise InputError(f"{text}: no name of a node; {self._hint(text)}") from None
        for name in names:
            if name not in self.names:
                raise InputError(f"{name}: no such node in the lab; {self._hint(name)}")
        return list(dict.fromkeys(names))

    def _hint(self, text: str) -> str:
        close = difflib.get_close_matches(text, self.names, n=1)
        return f"did you mean '{close[0]}'?" if close else f"there are: {compress_node_set(self.names)}"


def spec_file(folder: Path) -> Path:
    """Return the path of the file with a lab's spec, which marks a folder as a lab's state folder."""
    return folder / "lab.json"


def load_layout(folder: Path) -> LabLayout:
    """Return the layout of the lab that is up in `folder`.

    Raises:
        InputError: no lab is up in `folder`, or its spec file has errors.
    """
    if not spec_file(folder).is_file():
        raise InputError(f"no lab is up in {folder}; start one with `hpctrain lab up` (or set {FOLDER_VARIABLE})")
    return LabLayout(folder, LabSpec.read(spec_file(folder)))
