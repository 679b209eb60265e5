"""Which Slurm the lab runs: this machine's own, found on the path, or another one in a folder of its own."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
CLIENTS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")


@dataclass(frozen=True)
class SlurmInstallation:
    """Where the programs of a Slurm lie: on the path, or in the folders bin, sbin and lib/slurm of `prefix`."""

    prefix: Path | None

    def program(self, name: str) -> str:
        """What to call for a daemon or a client."""
        if self.prefix is None:
            return name
        return str(self.prefix / ("sbin" if name in DAEMONS else "bin") / name)

    @property
    def plugins(self) -> Path | None:
        """Where slurm.conf must say that the plugins are; absent: where the programs look by themselves."""
        return None if self.prefix is None else self.prefix / "lib" / "slurm"

    @property
    def slurmd_options(self) -> tuple[str, ...]:
        """A slurmd starts the slurmstepd of the folder that it was built for, unless told otherwise."""
        return () if self.prefix is None else ("-d", self.program("slurmstepd"))

    def missing(self) -> list[str]:
        """Files of `prefix` that are not there; of the machine's own Slurm, `requirements` knows."""
        if self.prefix is None:
            return []
        wanted = [Path(self.program(name)) for name in (*DAEMONS, *CLIENTS)]
        return [str(path) for path in (*wanted, self.prefix / "lib" / "slurm") if not path.exists()]

    def exports(self, slurm_conf: Path) -> list[str]:
        """Shell lines after which Slurm's commands are those of this Slurm, and speak to the lab."""
        path = [] if self.prefix is None else [f'export PATH={shlex.quote(str(self.prefix / "bin"))}:"$PATH"']
        return [*path, f"export SLURM_CONF={slurm_conf}"]
