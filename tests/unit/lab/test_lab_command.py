"""`hpctrain lab` from the command line, on a machine that only remembers."""

from __future__ import annotations

import dataclasses
import json

import pytest
from click.testing import CliRunner

from hpctrain.base.errors import FileError, InputError
from hpctrain.base.process import CommandResult
from hpctrain.cli.commands import lab as lab_command
from hpctrain.cli.main import cli
from hpctrain.lab import requirements
from hpctrain.lab.layout import CLIENTS, DAEMONS
from hpctrain.lab.machine import lab_lock
from hpctrain.lab.status import NodeState


@pytest.fixture
def lab(monkeypatch, machine, desk, tmp_path):
    """Calls `hpctrain lab …`; an error of hpctrain's own is raised."""
    monkeypatch.setenv("HPCTRAIN_LAB", str(tmp_path / "lab"))
    monkeypatch.setattr(lab_command, "this_machine", lambda: machine)
    monkeypatch.setattr(requirements, "missing_programs", lambda slurm, which=None: [])

    def idle(argv):
        if argv[-3:-1] != ("show", "node"):
            return None
        nodes = [line.split()[1] for line in machine.hosts.read_text().splitlines() if "hpctrain-lab" in line]
        return CommandResult(argv, 0, "\n".join(f"NodeName={n} State=IDLE SlurmdStartTime=1" for n in nodes), "")

    desk.answers.append(idle)

    def call(*words: str):
        return CliRunner().invoke(cli, ["lab", *words], catch_exceptions=False)

    return call


def test_up_prints_the_line_to_export_and_nothing_else_on_stdout(lab, tmp_path):
    done = lab("up", "--nodes", "3")
    assert done.stdout == f"export SLURM_CONF={tmp_path}/lab/slurm.conf\n"
    assert "network: 3 nodes" in done.stderr
    assert "up: 3 nodes in 0.0 s" in done.stderr


def test_another_slurm_is_told_with_its_path_and_stays_the_labs(lab, desk, tmp_path):
    prefix = tmp_path / "slurm"
    with pytest.raises(InputError, match=f"slurm.prefix: found '{prefix}', where there is no {prefix}/sbin/slurmctld"):
        lab("up", "--slurm", str(prefix))
    programs = [*(f"sbin/{name}" for name in DAEMONS), *(f"bin/{name}" for name in CLIENTS)]
    for path in (*programs, "lib/slurm/auth_munge.so"):
        (prefix / path).parent.mkdir(parents=True, exist_ok=True)
        (prefix / path).touch()
    desk.answers.insert(0, lambda argv: CommandResult(argv, 0, "slurm 24.11.5\n", "") if argv[-1] == "-V" else None)
    export = f'export PATH={prefix}/bin:"$PATH"\nexport SLURM_CONF={tmp_path}/lab/slurm.conf\n'
    assert lab("up", "--nodes", "1", "--slurm", str(prefix)).stdout == export
    assert f"PluginDir={prefix}/lib/slurm\n" in (tmp_path / "lab/slurm.conf").read_text()
    assert (tmp_path / "lab/cgroup.conf").read_text() == "CgroupPlugin=disabled\n"
    started = [argv for argv in desk.ran("start") if str(prefix / "sbin/slurmd") in argv]
    assert len(started) == 1
    assert started[0][-7:-5] == ("-d", f"{prefix}/sbin/slurmstepd")
    assert desk.ran("start", str(prefix / "sbin/slurmctld"))
    # Later commands know it from the lab's own record.
    desk.log.clear()
    lab("status", "--json")
    assert {argv[3] for argv in desk.ran("env") if "node" in argv} == {f"{prefix}/bin/scontrol"}
    assert lab("down").stderr.startswith("taken down: 3 daemons")


def test_two_versions_on_the_path_are_told_and_nothing_stays(lab, desk, tmp_path):
    def versions(argv):
        newer = "env" in argv
        return CommandResult(argv, 0, f"slurm {'24.11.5' if newer else '22.05.8'}\n", "") if argv[-1] == "-V" else None

    desk.answers.insert(0, versions)
    with pytest.raises(
        InputError, match=r"slurmd is of Slurm 22\.05 and scontrol says 'slurm 24\.11\.5'; correct PATH"
    ):
        lab("up")
    assert not (tmp_path / "lab").exists()


def test_up_reads_a_spec_file_and_tells_its_mistakes(lab, tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("nodes: [{name: left}, {name: right}]\n")
    assert lab("up", str(path)).exit_code == 0
    assert "198.18.7.11 right # hpctrain-lab" in (tmp_path / "hosts").read_text()
    path.write_text("noodles: 3\n")
    with pytest.raises(FileError, match="unknown key; did you mean 'nodes'"):
        lab("up", str(path))


def test_a_dry_run_needs_no_root_and_starts_nothing(lab, machine, desk, monkeypatch):
    monkeypatch.setattr(lab_command, "this_machine", lambda: dataclasses.replace(machine, uid=lambda: 1000))
    done = lab("up", "--nodes", "2", "--dry-run")
    assert "ip netns add hpct-node1\n" in done.stdout
    assert [argv for argv in desk.log if argv[-1] != "-V"] == []


@pytest.mark.parametrize(
    "words", [["up"], ["down"], ["status"], ["kill", "node0"], ["heal", "all"], ["cut", "node0", "node1"],
              ["shape", "node0", "--rate", "1mbit"]],
)  # fmt: skip
def test_whatever_touches_the_lab_needs_root_and_says_so(lab, machine, monkeypatch, words):
    monkeypatch.setattr(lab_command, "this_machine", lambda: dataclasses.replace(machine, uid=lambda: 1000))
    with pytest.raises(InputError, match=f"lab {words[0]}: needs root, this is user id 1000; run it with sudo"):
        lab(*words)


def test_faults_without_a_lab_say_how_to_start_one(lab):
    with pytest.raises(InputError, match=r"no lab is up in .*; start one with `hpctrain lab up`"):
        lab("kill", "node0")


def test_faults_by_name_set_and_all(lab, desk):
    lab("up", "--nodes", "3")
    desk.log.clear()
    assert "node2: killed 0 processes" in lab("kill", "node[1-2]", "--silent").stderr
    assert [argv[-2:] for argv in desk.log if "down" in argv] == [("hpctv1", "down"), ("hpctv2", "down")]
    assert lab("kill", "node0", "--hang").stderr == "node0: stopped 0 processes\n"
    assert lab("cut", "node0", "node[1-2]").stderr == "node0 and node1: cut\nnode0 and node2: cut\n"
    assert lab("shape", "all", "--rate", "5mbit", "--direction", "in").stderr.count("in 5mbit") == 3
    assert lab("shape", "node0", "--rate", "none").stderr == "node0: in and out not shaped\n"


def test_faults_answer_programs(lab, monkeypatch, tmp_path):
    up = json.loads(lab("up", "--nodes", "2", "--json").stdout)
    assert up["nodes"] == ["node0", "node1"]
    assert up["exports"] == [f"export SLURM_CONF={tmp_path}/lab/slurm.conf"]
    assert json.loads(lab("kill", "node0", "--hang", "--json").stdout) == {"nodes": [{"name": "node0", "processes": 0}]}
    assert json.loads(lab("cut", "node0", "node1", "--json").stdout) == {"cut": [["node0", "node1"]]}
    shaped = {"nodes": ["node0"], "directions": ["in"], "rate": "5mbit"}
    assert json.loads(lab("shape", "node0", "--rate", "5mbit", "--direction", "in", "--json").stdout) == shaped
    healed = {"node0": NodeState("node0", ("IDLE",), None)}
    monkeypatch.setattr(lab_command, "heal_nodes", lambda *_: healed)
    assert json.loads(lab("heal", "node0", "--json").stdout) == {"nodes": [{"name": "node0", "state": "idle"}]}
    assert "4 daemons" in json.loads(lab("down", "--json").stdout)["removed"]
    assert json.loads(lab("down", "--json").stdout) == {"removed": None}
    blueprint = json.loads(lab("up", "--nodes", "2", "--dry-run", "--json").stdout)["blueprint"]
    assert blueprint == lab("up", "--nodes", "2", "--dry-run").stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["up", "x.yaml", "--nodes", "2"], "give either SPEC or --nodes"),
        (["kill", "node0", "--silent", "--hang"], "give either --silent or --hang"),
        (["shape", "node0", "--rate", "fast"], "found 'fast'; allowed: a number with kbit, mbit or gbit"),
        (["shape", "node0", "--rate", "1mbit", "--direction", "up"], "'up' is not one of 'in', 'out', 'both'"),
        (["kill"], "Missing argument 'NODE...'"),
    ],
)
def test_wrong_usage_is_told(lab, words, told):
    done = lab(*words)
    assert done.exit_code == 2
    assert told in done.stderr


def test_status_for_people_and_for_scripts(lab, desk, tmp_path):
    lab("up", "--nodes", "2")

    def kernel(argv):
        if "class" in argv:
            return CommandResult(argv, 0, "class htb 1:1 root leaf 10: prio 0 rate 1Gbit ceil 1Gbit\n", "")
        if argv[-2:] == ("link", "show"):
            return CommandResult(argv, 0, '[{"ifname":"hpctv0","flags":["UP"]}]', "")
        return CommandResult(argv, 0, "3|train|low|RUNNING|node0|None\n", "") if "squeue" in argv else None

    desk.answers.append(kernel)
    found = json.loads(lab("status", "--json").stdout)
    assert [node["name"] for node in found["nodes"]] == ["node0", "node1"]
    text = lab("status").stdout
    row = next(line.split() for line in text.splitlines() if line.strip().startswith("node0"))
    assert row == ["node0", "198.18.7.10", "idle", "0", "1gbit", "1gbit"]
    assert "link down" in text
    assert "job 3 train: running in low on node0" in text
    assert text.splitlines()[-1] == f"export SLURM_CONF={tmp_path}/lab/slurm.conf"


def test_down_says_what_it_took_away(lab):
    lab("up", "--nodes", "2")
    assert lab("down").stderr.startswith("taken down: 4 daemons, lines in /etc/hosts, ")
    assert lab("down").stderr == "nothing to take down\n"


def test_two_commands_do_not_build_at_once(lab):
    with lab_lock(), pytest.raises(InputError, match="another `hpctrain lab` command is at work"):
        lab("down")
