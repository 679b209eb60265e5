"""Whole nodes, or a part of each: which it is, what the job then asks for, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from hypothesis import given
from hypothesis import strategies as st
from run_folders import slurm_run

from hpctrain.base.errors import FileError, InputError
from hpctrain.jobs.node_share import node_share
from hpctrain.launch.slurm_job.job_script import directives
from hpctrain.launch.slurm_job.queue import CheckedRun, check_queue
from hpctrain.launch.submission import preview
from hpctrain.records.run.run import Run
from hpctrain.slurm.cluster import NodeInfo, parse_gres
from hpctrain.slurm.commands import Slurm

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "exclusive.txt"


def run(**cluster: object) -> Run:
    return slurm_run(**{"nodes": "2", "partition": "low", **cluster})


class Unlike(FakeSlurm):
    """gpu1 has 8 GPUs and 64 CPUs in cores of two, some kept for the system; the other nodes 4 GPUs and 16 CPUs."""

    def _node_lines(self) -> list[str]:
        first, *others = super()._node_lines()
        first = first.replace("a100:4", "a100:8").replace("CPUEfctv=16 CPUTot=16", "CPUEfctv=62 CPUTot=64")
        return [first.replace("ThreadsPerCore=1", "MemSpecLimit=4000 ThreadsPerCore=2"), *others]


class Whole(FakeSlurm):
    """A partition, or a cluster, that gives no parts of nodes."""

    def __init__(self, partition: str, select: str = "select/cons_tres") -> None:
        super().__init__()
        self.partition, self.select = partition, select

    def _partition_lines(self) -> list[str]:
        return [
            line.replace(" State=", f" OverSubscribe={self.partition} State=") for line in super()._partition_lines()
        ]

    def _show(self, argv, what, name):
        done = super()._show(argv, what, name)
        return done if what != "config" else self._reply(argv, f"{done.stdout}SelectType = {self.select}\n")


def checked(asked: Run, tmp_path: Path, fake: FakeSlurm | None = None) -> CheckedRun:
    return check_queue(asked, Slurm(fake or FakeSlurm()), tmp_path, {}, tmp_path)


def words(asked: Run, tmp_path: Path, fake: FakeSlurm | None = None) -> str:
    """The line about whole nodes or parts."""
    lines = [line for line in checked(asked, tmp_path, fake).lines if "whole nodes (" in line or "a part of" in line]
    assert len(lines) == 1
    return lines[0]


def resources(asked: Run, tmp_path: Path, fake: FakeSlurm | None = None) -> list[str]:
    """What the job asks of a node."""
    options = directives(checked(asked, tmp_path, fake).asked, Path("/shared/run"))
    return [option for option in options if option.startswith(("--exclusive", "--mem", "--cpus", "--gpus"))]


WHOLE = ["--exclusive", "--gpus-per-node=4", "--mem=0"]
PART = ["--gpus-per-node=2", "--cpus-per-task=8", "--mem=32000M"]


def test_the_directives_are_the_golden_ones(tmp_path: Path) -> None:
    """Of true, false, and auto with some and with all GPUs of the nodes; the whole of what sbatch and srun are told."""
    cases = {
        "true": run(exclusive=True, devices_per_node=2),
        "false": run(exclusive=False, devices_per_node=2),
        "auto, 2 of 4 GPUs": run(devices_per_node=2),
        "auto, no number of GPUs": run(),
        "false without GPUs": run(exclusive=False, device="cpu", sbatch=["--cpus-per-task=4"]),
    }
    text = ""
    for name, case in cases.items():
        script = preview(checked(case, tmp_path).asked, Path("/shared/run")).splitlines()
        # Both commands that start a task on a node have the same options.
        step = sorted({line.partition(" bash -c")[0].strip() for line in script if "${SLURM_CPUS_PER_TASK" in line})
        text += "\n".join([f"== {name}", *(line for line in script if line.startswith("#SBATCH")), *step, "", ""])
    assert text.rstrip() == GOLDEN.read_text().rstrip()


def test_auto_takes_a_part_only_where_fewer_gpus_are_named(tmp_path: Path) -> None:
    assert resources(run(devices_per_node=2), tmp_path) == PART
    assert "2 of 4 GPUs, 8 CPUs, 31.2 GiB of memory; other jobs may run" in words(run(devices_per_node=2), tmp_path)
    for every in (run(), run(devices_per_node=4)):
        assert resources(every, tmp_path) == WHOLE
        assert words(every, tmp_path) == "whole nodes (the default of cluster.exclusive)"


def test_the_price_of_idle_gpus_is_said(tmp_path: Path) -> None:
    asked = words(run(devices_per_node=2, exclusive=True), tmp_path)
    assert asked == (
        "whole nodes (as cluster.exclusive asks): 2 × 4 GPUs are billed, the run uses 2 of each; "
        "`cluster.exclusive: false` asks for 2"
    )
    assert "2 × 4 GPUs are billed, the run uses none of them" in words(run(device="cpu"), tmp_path)


def test_where_slurm_gives_only_whole_nodes_no_part_is_asked_for(tmp_path: Path) -> None:
    for fake, why in ((Whole("EXCLUSIVE"), "OverSubscribe=EXCLUSIVE"), (Whole("NO", "select/linear"), "select/linear")):
        for exclusive in ("auto", False):
            asked = run(devices_per_node=2, exclusive=exclusive)
            assert resources(asked, tmp_path, fake) == ["--exclusive", "--gpus-per-node=2", "--mem=0"]
            line = words(asked, tmp_path, fake)
            assert why in line
            assert "2 × 4 GPUs are billed, the run uses 2 of each" in line
            assert "cluster.exclusive: false" not in line
    assert resources(run(devices_per_node=2), tmp_path, Whole("FORCE:4")) == PART


def test_options_in_the_run_file_come_before_the_share(tmp_path: Path) -> None:
    asked = run(devices_per_node=2, sbatch=["--cpus-per-task=3"])
    assert resources(asked, tmp_path) == ["--gpus-per-node=2", "--cpus-per-task=3", "--mem=32000M"]
    asked = run(devices_per_node=2, sbatch=["--mem-per-gpu=9G", "--cpus-per-gpu=2"])
    assert resources(asked, tmp_path) == ["--gpus-per-node=2", "--mem-per-gpu=9G", "--cpus-per-gpu=2"]
    asked = run(exclusive=False, sbatch=["--gres=gpu:a100:1"])
    assert resources(asked, tmp_path) == ["--cpus-per-task=4", "--mem=16000M"]


def test_a_part_without_gpus_needs_its_cpus(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cluster\.exclusive: found false, .*--cpus-per-task=8"):
        checked(run(device="cpu", exclusive=False), tmp_path)
    asked = run(device="cpu", exclusive=False, sbatch=["--cpus-per-task=4"])
    assert resources(asked, tmp_path) == ["--cpus-per-task=4", "--mem=16000M"]


def test_of_unlike_nodes_the_least_share_counts(tmp_path: Path) -> None:
    assert resources(run(nodes="1", devices_per_node=4), tmp_path, Unlike()) == [
        "--gpus-per-node=4", "--cpus-per-task=16", "--mem=30000M",
    ]  # fmt: skip
    only = run(nodes="1", devices_per_node=4, nodelist="gpu1")
    assert resources(only, tmp_path, Unlike())[1:] == ["--cpus-per-task=30", "--mem=30000M"]


class Small(Unlike):
    """gpu2 has 2 CPUs, and gpu3 states no memory."""

    def _node_lines(self) -> list[str]:
        first, second, third = super()._node_lines()
        return [first, second.replace("=16 CPU", "=2 CPU"), third.replace("RealMemory=64000", "RealMemory=1")]


def test_unlike_shares_are_printed_as_a_range_with_advice(tmp_path: Path) -> None:
    asked = run(nodes="1", devices_per_node=4)
    part, advice = [
        line for line in checked(asked, tmp_path, Unlike()).lines if "a part of" in line or "the share" in line
    ]
    assert part.startswith("a part of each node (fewer GPUs are asked for than it has): 4 of 4 to 8 GPUs, 16 CPUs")
    assert "16 to 30 CPUs and 29.3 GiB to 62.5 GiB of memory, and the least is asked for on every node" in advice
    assert "-C or cluster.gpu_type, or write --cpus-per-task and --mem into cluster.sbatch" in advice
    assert not [line for line in checked(run(devices_per_node=2), tmp_path).lines if "differs" in line]


def test_unknown_memory_of_a_node_is_no_memory_limit(tmp_path: Path) -> None:
    asked = run(nodes="1", devices_per_node=4)
    assert resources(asked, tmp_path, Small())[-1] == "--mem=30000M"


def test_nodes_that_accept_no_jobs_do_not_count(tmp_path: Path) -> None:
    fake = Unlike()
    fake.node_states |= {"gpu2": "IDLE+DRAIN", "gpu3": "DOWN"}
    asked = run(nodes="1", devices_per_node=4)
    assert resources(asked, tmp_path, fake)[1:] == ["--cpus-per-task=30", "--mem=30000M"]
    assert "4 of 8 GPUs, 30 CPUs" in words(asked, tmp_path, fake)


class Capped(FakeSlurm):
    """Partitions that leave CPUs and memory of their nodes to others."""

    def _partition_lines(self) -> list[str]:
        limits = " MaxCPUsPerNode=12 MaxMemPerNode=20000 State="
        return [line.replace(" State=", limits) for line in super()._partition_lines()]


def test_the_limits_of_the_partition_cap_the_share(tmp_path: Path) -> None:
    asked = run(devices_per_node=2)
    assert resources(asked, tmp_path, Capped()) == ["--gpus-per-node=2", "--cpus-per-task=6", "--mem=20000M"]
    cut = [line for line in checked(asked, tmp_path, Capped()).lines if "was cut" in line]
    assert cut == ["the share was cut to what partition low allows: MaxCPUsPerNode, MaxMemPerNode"]
    asked = run(devices_per_node=2, sbatch=["--cpus-per-task=3"])
    assert "was cut to what partition low allows: MaxMemPerNode" in "\n".join(checked(asked, tmp_path, Capped()).lines)


def test_gpus_of_all_nodes_together_give_no_share(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not known how many GPUs each node gives; ask for them with -G or") as error:
        checked(run(exclusive=False, sbatch=["--gpus=1"]), tmp_path)
    assert "asks for no GPUs" not in str(error.value)
    assert "--cpus-per-task" in str(error.value)


@pytest.mark.parametrize("option", ["--exclusive=user", "--oversubscribe", "--share"])
def test_options_that_take_back_whole_nodes_are_refused(tmp_path: Path, option: str) -> None:
    for exclusive in ("auto", True):
        with pytest.raises(InputError, match=r"found --.* leave it out, .*cluster\.exclusive: false"):
            checked(run(exclusive=exclusive, sbatch=[option]), tmp_path)
    assert option in checked(run(exclusive=False, devices_per_node=2, sbatch=[option]), tmp_path).asked.cluster.sbatch


@pytest.mark.parametrize("value", ["maybe", 1, None])
def test_another_value_is_one_line(value: object) -> None:
    with pytest.raises(FileError) as error:
        run(exclusive=value)
    assert str(error.value).count("\n") == 0
    assert "cluster.exclusive: found" in str(error.value)
    assert "allowed: auto, true, false" in str(error.value)


def test_a_controller_that_is_away_leaves_whole_nodes_unless_told_otherwise(tmp_path: Path) -> None:
    fake = FakeSlurm()
    fake.away = True
    assert "--exclusive" in resources(run(devices_per_node=2), tmp_path, fake)
    assert resources(run(devices_per_node=2, exclusive=False), tmp_path, fake) == ["--gpus-per-node=2"]


def test_the_option_has_a_key() -> None:
    with pytest.raises(InputError, match=r"found --exclusive; write cluster\.exclusive: true"):
        directives(run(sbatch=["--exclusive"], exclusive=False), Path("/shared/run"))
    assert "--exclusive=user" in directives(run(sbatch=["--exclusive=user"], exclusive=False), Path("/shared/run"))


@given(st.integers(1, 16), st.integers(1, 256), st.integers(1, 4), st.integers(0, 2**20), st.data())
def test_equal_parts_fill_a_node_and_all_fit(
    gpus: int, cores: int, threads: int, mib: int, data: st.DataObject
) -> None:
    part = data.draw(st.integers(1, gpus))
    node = NodeInfo("a", "a", frozenset(), parse_gres(f"gpu:{gpus}"), (), cores * threads, threads, mib)
    share, jobs = node_share(node, part, None), gpus // part
    assert share is not None
    assert share.cpus is not None
    assert share.cpus % threads == 0
    assert jobs * share.cpus <= cores * threads or share.cpus == threads  # fewer cores than GPUs
    assert jobs * (share.memory_mib or 0) <= mib
