"""The texts that a lab consists of: slurm.conf, cgroup.conf, /etc/hosts and the CPU groups' files."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import InputError, StorageError
from hpctrain.lab import config_files
from hpctrain.lab.config_files import (
    CpuController,
    cgroup_conf,
    find_cpu_control,
    share_files,
    share_folders,
    slurm_conf,
    task_prolog,
)
from hpctrain.lab.layout import LabLayout
from hpctrain.lab.spec import LabSpec

GOLDEN = Path(__file__).parents[2] / "golden" / "lab_slurm.conf"


def layout(**spec: object) -> LabLayout:
    return LabLayout(Path("/run/hpctrain-lab"), LabSpec.from_json(spec))


def test_the_default_lab_has_the_recorded_slurm_conf():
    assert slurm_conf(layout(), "vm") == GOLDEN.read_text()


def test_what_the_spec_says_is_in_slurm_conf():
    text = slurm_conf(
        layout(
            nodes=[{"name": "a", "cpus": 1}, {"name": "b", "memory_bytes": 2**30}],
            partitions=[{"name": "p", "default": True, "nodes": "b", "preempt_mode": "cancel", "default_time": "5"}],
            slurm={"preempt_send_user_signal": False, "slurmd_timeout_s": 33, "cred_expire_s": 44},
        ),
        "vm",
    )
    assert "preempt_send_user_signal" not in text
    assert "NodeName=a NodeAddr=198.18.7.10 CPUs=1 RealMemory=4096 State=UNKNOWN\n" in text
    assert "NodeName=b NodeAddr=198.18.7.11 CPUs=2 RealMemory=1024 State=UNKNOWN\n" in text
    assert "PartitionName=p Nodes=b Default=YES PriorityTier=1 PreemptMode=CANCEL GraceTime=0 " in text
    assert "MaxTime=UNLIMITED DefaultTime=5 State=UP\n" in text
    assert "SlurmdTimeout=33\n" in text
    assert "cred_expire=44\n" in text


def test_slurm_is_kept_from_the_hosts_cgroups():
    assert cgroup_conf((24, 11)) == "CgroupPlugin=disabled\n"
    assert "IgnoreSystemd=yes" in cgroup_conf((22, 5))


LINES = st.lists(st.sampled_from(["127.0.0.1 localhost", "", "# a comment", "10.0.0.1 other.example other"]))


@given(LINES, st.integers(1, 20), st.integers(1, 20))
def test_the_hosts_file_comes_back_as_it_was(lines, first, second):
    before = "".join(line + "\n" for line in lines)
    once = config_files.with_lab(before, layout(nodes=first))
    again = config_files.with_lab(once, layout(nodes=second))
    assert again.count("# hpctrain-lab") == second
    assert f"198.18.7.{9 + second} node{second - 1} # hpctrain-lab\n" in again
    assert config_files.without_lab(again) == before


def test_a_hosts_file_without_a_last_line_end_keeps_its_last_line():
    assert config_files.with_lab("127.0.0.1 localhost", layout(nodes=1)).splitlines()[0] == "127.0.0.1 localhost"


def test_another_hosts_name_is_not_taken():
    with pytest.raises(InputError, match="found 'node1', which /etc/hosts gives to another host"):
        config_files.with_lab("10.0.0.7 head node1 # ours\n", layout(nodes=2))


def test_a_mounted_hosts_file_is_written_into(tmp_path, monkeypatch):
    path = tmp_path / "hosts"
    path.write_text("old")

    def busy(path: Path, text: str) -> None:
        raise StorageError("busy") from OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(config_files, "rewrite_text", busy)
    config_files.write_hosts(path, "new\n")
    assert path.read_text() == "new\n"


def test_any_other_error_of_the_hosts_file_is_told(tmp_path):
    with pytest.raises(StorageError, match="make the folder first"):
        config_files.write_hosts(tmp_path / "nowhere" / "hosts", "new\n")


SHARED = {"nodes": [{"name": "a", "cpu_share": 0.5}, {"name": "b"}]}


def test_a_share_in_cgroup_v1():
    control = find_cpu_control(
        "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\n"
    )
    assert control == CpuController(1, Path("/sys/fs/cgroup/cpu"))
    group = Path("/sys/fs/cgroup/cpu/hpctrain-lab")
    assert share_folders(control, layout(**SHARED)) == [group, group / "a"]
    assert share_files(control, layout(**SHARED)) == [
        (group / "a/cpu.cfs_period_us", "20000"),
        (group / "a/cpu.cfs_quota_us", "10000"),
    ]


def test_a_share_in_cgroup_v2(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    control = find_cpu_control(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert control == CpuController(2, tmp_path)
    assert share_files(control, layout(**SHARED)) == [
        (tmp_path / "cgroup.subtree_control", "+cpu"),
        (tmp_path / "hpctrain-lab/cgroup.subtree_control", "+cpu"),
        (tmp_path / "hpctrain-lab/a/cpu.max", "10000 20000"),
    ]


def test_without_shares_no_group_is_made(tmp_path):
    assert share_folders(CpuController(1, tmp_path), layout(nodes=3)) == []
    assert share_files(CpuController(2, tmp_path), layout(nodes=3)) == []


def test_without_a_controller_there_is_no_control(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    assert find_cpu_control(f"cgroup2 {tmp_path} cgroup2 rw 0 0\nproc /proc proc rw 0 0\n") is None


@pytest.mark.parametrize("linked", [False, True])
def test_everybody_may_still_read_the_hosts_file(tmp_path, linked):
    """The lab's own files are for root alone, and so is its umask."""
    path = target = tmp_path / "hosts"
    if linked:
        target = tmp_path / "elsewhere"
        path.symlink_to(target)
    target.write_text("old\n")
    target.chmod(0o644)
    if os.getuid() == 0:
        os.chown(target, 1234, 5678)
    before = os.umask(0o077)
    try:
        config_files.write_hosts(path, "new\n")
    finally:
        os.umask(before)
    status = path.stat()
    assert (path.is_symlink(), path.read_text(), stat.S_IMODE(status.st_mode)) == (linked, "new\n", 0o644)
    assert (status.st_uid, status.st_gid) == ((1234, 5678) if os.getuid() == 0 else (os.getuid(), status.st_gid))


@pytest.mark.parametrize(("nodes", "cores", "threads"), [(4, 2, 1), (4, 9, 2), (1, 8, 8), (2, 1, 1)])
def test_a_task_gets_the_nodes_share_of_the_cores_unless_it_brings_a_number(tmp_path, nodes, cores, threads):
    script = tmp_path / "prolog"
    script.write_text(task_prolog(layout(nodes=nodes), cores))
    script.chmod(0o755)
    path = {"PATH": os.environ["PATH"]}

    def says(env: dict[str, str]) -> str:
        return subprocess.run([script], env=path | env, capture_output=True, text=True, check=True).stdout

    assert says({}) == f"export OMP_NUM_THREADS={threads}\n"
    assert says({"OMP_NUM_THREADS": "3"}) == ""
