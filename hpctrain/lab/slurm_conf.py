"""slurm.conf and cgroup.conf of a lab, as text. Pure. slurm.conf(5) and cgroup.conf(5) explain each key."""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.package_data import render_template
from hpctrain.lab.layout import LabLayout

CONTROLLER_PORT = 16817
"""Port of the lab's slurmctld. It differs from Slurm's default 6817, because this machine may be part of a cluster."""
NODE_PORT = 16818
_TEMPLATE = Path(__file__).with_name("slurm.conf.j2")


def slurm_conf(layout: LabLayout, hostname: str) -> str:
    """Return the text of slurm.conf.

    Args:
        hostname: this machine's short host name; slurmctld does not start under another name.
    """
    return render_template(
        _TEMPLATE,
        layout=layout,
        spec=layout.spec,
        slurm=layout.spec.slurm,
        hostname=hostname,
        controller_port=CONTROLLER_PORT,
        node_port=NODE_PORT,
    )


def cgroup_conf(version: tuple[int, int]) -> str:
    """Return the text of cgroup.conf, which keeps Slurm off the host's cgroups as far as its version allows: all nodes
    of the lab share them."""
    if version >= (24, 5):
        return "CgroupPlugin=disabled\n"
    return "CgroupPlugin=autodetect\nIgnoreSystemd=yes\n"
