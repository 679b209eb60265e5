"""The Slurm that the lab runs: this machine's, found by the PATH, or another one in a separate folder."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
CLIENTS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")


@dataclass(frozen=True)
class SlurmInstallation:
    """Where Slurm's programs are: on the PATH, or in the folders bin, sbin and lib/slurm of `prefix`."""

    prefix: Path | None

    def program(self, name: str) -> str:
        """Return the path or name by which to run a daemon or a client."""
        if self.prefix is None:
            return name
        return str(self.prefix / ("sbin" if name in DAEMONS else "bin") / name)

    @property
    def plugins(self) -> Path | None:
        """The plugin folder for slurm.conf; None: Slurm's default."""
        return None if self.prefix is None else self.prefix / "lib" / "slurm"

    @property
    def slurmd_options(self) -> tuple[str, ...]:
        """Options that make slurmd start the slurmstepd of `prefix`; by default it starts that of the folder it was
        built for."""
        return () if self.prefix is None else ("-d", self.program("slurmstepd"))

    def missing(self) -> list[str]:
        """Return the files that `prefix` lacks; [] for this machine's Slurm, which lab/requirements.py checks."""
        if self.prefix is None:
            return []
        wanted = [Path(self.program(name)) for name in (*DAEMONS, *CLIENTS)]
        return [str(path) for path in (*wanted, self.prefix / "lib" / "slurm") if not path.exists()]

    def exports(self, slurm_conf: Path) -> list[str]:
        """Return shell lines after which Slurm's commands are those of this installation and use the lab."""
        path = [] if self.prefix is None else [f'export PATH={shlex.quote(str(self.prefix / "bin"))}:"$PATH"']
        return [*path, f"export SLURM_CONF={slurm_conf}"]
