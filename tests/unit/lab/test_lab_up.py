"""Building and clearing a lab, on a machine that only remembers what it was told."""

from __future__ import annotations

import dataclasses

import pytest

from hpctrain.base.errors import CommandError, InputError, RefusedError
from hpctrain.base.process import CommandResult
from hpctrain.lab.daemons import daemon_pids, running_slurmd, slurmd_argv
from hpctrain.lab.layout import LabLayout, SlurmInstallation, load_layout
from hpctrain.lab.requirements import PACKAGES, PROGRAMS, install, require_namespaces, require_programs, require_root
from hpctrain.lab.spec import LabSpec
from hpctrain.lab.up import bring_up, clear, leftovers, make_blueprint, slurm_version

OWN = SlurmInstallation(None)
IDLE = "NodeName={name} NodeAddr=198.18.7.10 State=IDLE SlurmdStartTime=1000 Reason=none"


def layout_in(folder, **spec) -> LabLayout:
    return LabLayout(folder / "lab", LabSpec.from_json({"nodes": 2, **spec}))


def all_idle(layout: LabLayout):
    def answer(argv):
        if "scontrol" in argv and "show" in argv:
            return CommandResult(argv, 0, "\n".join(IDLE.format(name=name) for name in layout.names), "")
        return None

    return answer


def test_up_records_builds_starts_and_waits(machine, desk, tmp_path):
    layout = layout_in(tmp_path, cpu_share=0.5)
    desk.answers.append(all_idle(layout))
    told: list[str] = []
    bring_up(machine, layout, tell=told.append)
    started = [argv[1] for argv in desk.ran("start")]
    assert started == ["munged", "slurmctld", "nsenter", "nsenter"]
    network = desk.log.index(("ip", "-n", "hpctfabric", "link", "set", "lo", "up"))
    assert network < desk.log.index(desk.ran("start")[0])
    assert load_layout(layout.folder).spec == layout.spec
    assert "SlurmctldHost=vm(198.18.7.1)" in layout.slurm_conf.read_text()
    assert (layout.munge / "key").stat().st_mode & 0o777 == 0o600
    assert len((layout.munge / "key").read_bytes()) == 128
    assert (layout.folder / "ready").exists()
    assert machine.hosts.read_text().endswith("198.18.7.10 node0 # hpctrain-lab\n198.18.7.11 node1 # hpctrain-lab\n")
    share = tmp_path / "cpu/hpctrain-lab/node1"
    assert [(share / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")] == ["10000", "20000"]
    assert layout.task_prolog.stat().st_mode & 0o777 == 0o755
    assert told == [
        "network: 2 nodes in 198.18.7.0/24",
        "threads: OMP_NUM_THREADS=3 in each task: 2 nodes share 6 cores",
        "daemons: munged, slurmctld, a slurmd for each node",
    ]


def test_a_dry_run_tells_all_of_it_and_changes_nothing(machine, desk, tmp_path):
    layout = layout_in(tmp_path, cpu_share=0.5)
    lines = make_blueprint(machine, layout, (22, 5)).lines()
    assert f"mkdir -p {layout.folder}" in lines
    assert "ip netns add hpct-node1" in lines
    assert any(line.startswith("nsenter --net=/run/netns/hpct-node1 unshare --uts sh -c ") for line in lines)
    assert "add to /etc/hosts: 198.18.7.11 node1" in lines
    assert any(line.endswith("node0/cpu.cfs_quota_us") for line in lines)
    assert desk.log == []
    assert not layout.folder.exists()


def test_a_lab_that_is_up_is_not_built_again(machine, desk, tmp_path):
    layout = layout_in(tmp_path)
    desk.answers.append(all_idle(layout))
    bring_up(machine, layout)
    with pytest.raises(InputError, match=r"a lab is up in .*; use it .* `hpctrain lab down`, or `lab up --replace`"):
        bring_up(machine, layout)
    bring_up(machine, layout, replace=True)
    assert len(desk.ran("start", "slurmctld")) == 2


def test_what_a_crashed_up_left_is_cleared_first(machine, desk, tmp_path):
    layout = layout_in(tmp_path)
    desk.answers.append(all_idle(layout))
    layout.folder.mkdir()
    layout.spec.write(layout.spec_file)
    desk.namespaces = {"hpctfabric": set(), "hpct-node7": {700}, "somebody": {701}}
    desk.table = {700: ("sleep", "9"), 701: ("sleep", "9"), 702: ("slurmctld", "-D", "-f", str(layout.slurm_conf))}
    desk.control_alias = f"hpctrain lab {layout.folder}"
    told: list[str] = []
    bring_up(machine, layout, tell=told.append)
    assert told[0].startswith("clearing what an earlier lab left: 2 network namespaces, 1 daemon, hpctctl")
    cleared = desk.log[: desk.log.index(("ip", "-n", "hpctfabric", "link", "set", "lo", "up"))]
    assert ("signal", "702", "9") in cleared
    assert ("signal", "700", "9") in cleared
    assert ("ip", "netns", "del", "hpct-node7") in cleared
    assert ("ip", "link", "del", "hpctctl") in cleared
    assert 701 in desk.table
    assert ("ip", "netns", "del", "somebody") not in desk.log


def test_a_daemon_that_ends_takes_the_half_built_lab_with_it(machine, desk, tmp_path):
    layout = layout_in(tmp_path)
    layout.folder.mkdir()
    start = desk.start

    def start_and_die(argv, env=None, log=None, keep_fds=()):
        process = start(argv, env, log, keep_fds)
        if argv[0] == "slurmctld":
            process.code = 1
            log.write_text("slurmctld: fatal: no such host\n")
        return process

    desk.start = start_and_die
    with pytest.raises(CommandError, match="slurmctld ended with 1: slurmctld: fatal: no such host"):
        bring_up(machine, layout)
    assert not layout.folder.exists()
    assert machine.hosts.read_text() == "127.0.0.1 localhost\n"
    assert daemon_pids(machine, layout.folder) == []


def test_a_munged_without_a_socket_takes_the_half_built_lab_with_it(machine, desk, tmp_path):
    layout = layout_in(tmp_path)
    start = desk.start

    def start_without_socket(argv, env=None, log=None, keep_fds=()):
        process = start(argv, env, log, keep_fds)
        if argv[0] == "munged":
            layout.munge_socket.unlink()
            log.write_text("munged: Warning: low entropy\n")
        return process

    desk.start = start_without_socket
    with pytest.raises(CommandError, match=r"munged runs, but .*/socket is missing 10 s .*: Warning: low entropy; run"):
        bring_up(machine, layout)
    assert desk.ran("start", "slurmctld") == []
    assert not layout.folder.exists()


def test_nodes_that_never_answer_end_the_wait(machine, desk, tmp_path):
    layout = layout_in(tmp_path)
    with pytest.raises(CommandError, match="not all nodes answered within 60 s; Slurm says nothing"):
        bring_up(machine, layout)
    assert not layout.folder.exists()


def test_a_folder_of_something_else_is_left_alone(machine, tmp_path):
    layout = layout_in(tmp_path)
    layout.folder.mkdir()
    (layout.folder / "thesis.tex").touch()
    with pytest.raises(InputError, match="holds something that is no lab's"):
        bring_up(machine, layout)
    clear(machine, layout.folder)
    assert (layout.folder / "thesis.tex").exists()


def test_a_lab_in_another_folder_is_found_by_the_interface(machine, desk, tmp_path):
    layout = layout_in(tmp_path)
    layout.folder.mkdir()
    layout.spec.write(layout.spec_file)
    desk.control_alias = f"hpctrain lab {layout.folder}"
    desk.table = {9: ("munged", "--foreground", f"--socket={layout.munge_socket}")}
    found = clear(machine, tmp_path / "elsewhere")
    assert found.folders == (layout.folder,)
    assert desk.table == {}
    assert not layout.folder.exists()


def test_a_machine_without_a_lab_has_no_leftovers(machine, tmp_path):
    assert not leftovers(machine, tmp_path / "lab")


def test_only_daemons_of_this_very_lab_are_ours(machine, desk, tmp_path):
    layout = layout_in(tmp_path)
    conf = str(layout.slurm_conf)
    ours = {1: ("/usr/sbin/slurmctld", "-D", "-f", conf), 2: slurmd_argv(layout, "node0", None)}
    ours[3] = ("slurmd", "-D", "-f", conf, "-N", "node1")
    others = {
        11: ("slurmctld", "-D"),
        12: ("slurmd", "-D", "-f", "/etc/slurm/slurm.conf", "-N", "node1"),
        13: ("vim", conf),
        14: ("sh", "check.sh", conf),
        15: ("munged", "--socket=/run/munge/munge.socket.2"),
    }
    desk.table = {**ours, **others}
    assert daemon_pids(machine, layout.folder) == [1, 2, 3]
    assert running_slurmd(machine, layout, "node1") == [3]
    assert running_slurmd(machine, layout, "node0") == []


def test_a_shared_cpu_needs_a_controller(machine, tmp_path):
    machine.mounts.write_text("proc /proc proc rw 0 0\n")
    with pytest.raises(RefusedError, match="cpu_share: this machine mounts no cgroup with a CPU controller"):
        make_blueprint(machine, layout_in(tmp_path, cpu_share=0.5), (22, 5))
    assert make_blueprint(machine, layout_in(tmp_path), (22, 5)).groups == ()


def test_the_version_of_slurm(machine, desk):
    assert slurm_version(machine, OWN) == (22, 5)
    desk.answers.append(lambda argv: CommandResult(argv, 0, "what?\n", ""))
    with pytest.raises(CommandError, match="slurmd -V: found 'what\\?'"):
        slurm_version(machine, OWN)


def test_a_user_who_is_not_root_is_told(machine):
    require_root(machine, "up")
    with pytest.raises(InputError, match="lab up: needs root, this is user id 1000; run it with sudo"):
        require_root(dataclasses.replace(machine, uid=lambda: 1000), "up")


def test_a_container_without_the_right_is_told(machine, desk):
    require_namespaces(machine)
    assert ("ip", "netns", "del", "hpctfabric") in desk.log
    desk.answers.append(
        lambda argv: CommandResult(argv, 1, "", "mount --make-shared /run/netns failed: not permitted\n")
    )
    with pytest.raises(
        RefusedError, match=r"cannot make a network namespace here: mount .* not permitted; use a virtual"
    ):
        require_namespaces(machine)


def test_what_is_missing_is_installed_once(machine, desk):
    there = set(PROGRAMS) - {"slurmd", "munged"} | {"apt-get"}

    def which(name: str) -> str | None:
        return name if name in there else None

    with pytest.raises(InputError, match="not found on the path: slurmd, munged; `hpctrain lab up --install`"):
        require_programs(OWN, which)

    def apt(argv):
        if "install" in argv:
            there.update(PROGRAMS)
        return

    desk.answers.append(apt)
    assert install(machine, OWN, which)
    assert desk.log[-1][-len(PACKAGES) :] == PACKAGES
    assert not install(machine, OWN, which)
    assert len(desk.log) == 2


def test_an_installation_that_fails_says_why(machine, desk):
    desk.answers.append(lambda argv: CommandResult(argv, 100, "", "noise\nE: Unable to locate package slurmd\n"))
    with pytest.raises(RefusedError, match="apt-get update: ended with 100: E: Unable to locate package slurmd"):
        install(machine, OWN, lambda name: name if name == "apt-get" else None)
    with pytest.raises(InputError, match="there is no apt-get here; install slurmctld, slurmd"):
        install(machine, OWN, lambda name: None)
