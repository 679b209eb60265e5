"""The local transport: what a virtual node is started with."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain import __version__
from hpctrain.base.errors import FileError, InputError, RefusedError
from hpctrain.launch.local import LocalNodes, check_gpus, local_environment, local_gpus, local_nodes, share_gpus
from hpctrain.launch.preflight.checks import check_devices, check_plan, check_topology, is_usable
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.plan import Plan, Replica, Stage
from hpctrain.records.run.run import Run, read_run
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology
from hpctrain.runs.folder import RunFolder, create_run_folder, lock_holder, lock_run_folder

SPEC = DecoderSpec(layers=4, dim=32, heads=4, vocab=64)
RUN = Run.from_json(
    {
        "steps": 10,
        "model": {"dims": SPEC.to_json()},
        "data": {"train": ["/data"]},
        "batch": {"global": 8},
        "optimizer": {"clip_norm": None},
    }
)


def topology(*names: str, created: str = "2026-01-01T00:00:00Z") -> Topology:
    return Topology(
        provenance=Provenance(version="0", created=created, transport="tcp"),
        device_types={"cpu": DeviceType(kind="cpu", name="cpu")},
        nodes=[Node(id=name, addr="127.0.0.1", devices=[Device(id="cpu0", type="cpu")]) for name in names],
    )


def plan(**changes: object) -> Plan:
    values: dict[str, object] = {
        "pp": 1, "dp": 1, "tp": 1, "stages": [Stage(layers=(0, 4))],
        "replicas": [Replica(sequences=8, micro_batch=4, micro_batches=2, devices=[["local0:cpu0"]])],
        "ranks": ["local0:cpu0"],
    }  # fmt: skip
    return Plan.model_validate({**values, **changes})


def test_each_virtual_node_gets_an_even_share_of_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert local_environment(1, {})["OMP_NUM_THREADS"] == str(cores)
    assert local_environment(4 * cores, {})["OMP_NUM_THREADS"] == "1"
    assert local_environment(1, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_a_plan_by_hand_uses_at_most_one_end_of_a_broken_link() -> None:
    replica = Replica(sequences=8, micro_batch=4, micro_batches=2, devices=[["local0:cpu0"], ["local2:cpu0"]])
    both = plan(
        pp=2,
        stages=[Stage(layers=(0, 2)), Stage(layers=(2, 4))],
        replicas=[replica],
        ranks=["local0:cpu0", "local2:cpu0"],
    )
    whole = topology("local0", "local1", "local2")
    check_devices(both, whole, "plan.json")
    cut = whole.model_copy(update={"fabric": Fabric(broken=[("local0", "local2")])})
    check_devices(plan(), cut, "plan.json")
    with pytest.raises(
        RefusedError, match="it uses local0 and local2, whose link the probe could not measure; allowed: one"
    ):
        check_devices(both, cut, "plan.json")


def test_a_topology_must_cover_the_nodes_and_be_young() -> None:
    now = 1767225600.0  # 2026-01-01
    week = 7 * 24 * 3600.0
    assert is_usable(topology("local0", "local1"), ["local0"], now + week - 1)
    assert not is_usable(topology("local0", "local1"), ["local0"], now + week + 1)
    assert not is_usable(topology("local0"), ["local0", "local1"], now)
    with pytest.raises(RefusedError, match="it is a topology of n7; this run has local0, local1"):
        check_topology(topology("n7"), local_nodes(2), "t.json")


def test_a_plan_must_be_of_this_run() -> None:
    check_plan(plan(), RUN, SPEC, ["local0"], "plan.json")
    with pytest.raises(RefusedError, match="provisional"):
        check_plan(plan(provisional=True), RUN, SPEC, ["local0"], "plan.json")
    two = [["local0:cpu0", "local0:cpu1", "local0:cpu2"]]
    wide = plan(
        tp=3, ranks=two[0], replicas=[Replica(sequences=8, micro_batch=4, micro_batches=2, devices=two)]
    )  # fmt: skip
    with pytest.raises(FileError) as caught:
        check_plan(wide, RUN, SPEC, ["local0"], "plan.json")
    assert [mistake.field for mistake in caught.value.mistakes] == ["tp"]


def test_a_custom_schedule_must_be_whole() -> None:
    torn = plan(schedule="custom", actions={0: {0: ["0F0", "0B0"]}})
    with pytest.raises(InputError, match="complete the table"):
        check_plan(torn, RUN, SPEC, ["local0"], "plan.json")


def test_a_run_folder_holds_the_resolved_run_and_a_key_for_its_owner(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path / "runs", RUN, topology("local0"), plan(), 0.0)
    assert folder.path.name.startswith("run-19700101T000000Z-")
    again = read_run(folder.path / "run.yaml")
    assert again == RUN
    assert again.optimizer.clip_norm is None
    assert (folder.path / "key").stat().st_mode & 0o777 == 0o600
    assert Plan.read(folder.path / "plan.json") == plan()


def test_a_run_folder_is_for_one_run_at_a_time(tmp_path: Path) -> None:
    lock = lock_run_folder(tmp_path)
    with pytest.raises(InputError, match=f"in use by process {os.getpid()} on {platform.node()}"):
        lock_run_folder(tmp_path)
    holder = lock_holder(tmp_path)
    assert holder is not None
    assert (holder.pid, holder.is_here) == (os.getpid(), True)
    lock.close()
    assert lock_holder(tmp_path) is None
    lock_run_folder(tmp_path).close()


def test_attempts_are_one_line_each(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    assert folder.begin_attempt(["local0"], 1.0) == 0
    (checkpoints / "step-00000010").mkdir()
    folder.end_attempt(0, 2.0, "lost", 75, "infrastructure")
    assert folder.begin_attempt(["n0", "n1"], 3.0, "77", 2) == 1
    assert folder.attempts() == [
        {
            "attempt": 0, "job_id": None, "restarts": 0, "nodes": ["local0"], "start": 1.0, "hpctrain": __version__,
            "checkpoint_before": None,
            "end": 2.0, "class": "infrastructure", "reason": "lost", "checkpoint_after": "step-00000010", "code": 75,
        },
        {
            "attempt": 1, "job_id": "77", "restarts": 2, "nodes": ["n0", "n1"], "start": 3.0, "hpctrain": __version__,
            "checkpoint_before": "step-00000010",
        },
    ]  # fmt: skip
    assert [line["attempt"] for line in folder.open_attempts()] == [1]
    folder.end_attempt(1, 5.0, "ended without a word", None, "infrastructure")
    assert "code" not in folder.attempts()[1]
    assert folder.open_attempts() == []


class Recording:
    """A runner that records the environments of what it is asked to start."""

    def __init__(self) -> None:
        self.environments: list[dict[str, str]] = []

    def start(self, argv: list[str], *, env: dict[str, str], **_: object) -> None:
        self.environments.append(env)


def visible(tmp_path: Path, count: int) -> list[str | None]:
    runner = Recording()
    nodes = LocalNodes(tmp_path, local_nodes(count), runner)  # type: ignore[arg-type]
    for node in nodes.nodes:
        nodes.start("run", node, tmp_path / "log")
    return [env.get("CUDA_VISIBLE_DEVICES") for env in runner.environments]


@given(st.lists(st.uuids().map(str), unique=True, max_size=17), st.integers(1, 20))
def test_gpus_are_shared_out_once_and_evenly_or_not_at_all(gpus: list[str], count: int) -> None:
    shares = share_gpus(gpus, count)
    assert len(shares) == count
    assert [gpu for share in shares for gpu in share] == (gpus if len(gpus) >= count else [])
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("listed", "gpus"),
    [
        ("0,1", ["0", "1"]),
        (" GPU-a , MIG-b ", ["GPU-a", "MIG-b"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("3,-1,2", ["3"]),
        ("2,,1", ["2"]),
    ],
)
def test_the_environment_says_which_gpus_may_be_used(listed: str, gpus: list[str]) -> None:
    assert local_gpus({"CUDA_VISIBLE_DEVICES": listed}) == gpus
    assert local_gpus({"HIP_VISIBLE_DEVICES": listed}) == gpus
    assert local_gpus({"CUDA_VISIBLE_DEVICES": "7", "HIP_VISIBLE_DEVICES": listed}) == ["7"]


def test_of_amds_gpus_those_of_the_job_are_counted_anew() -> None:
    assert local_gpus({"ROCR_VISIBLE_DEVICES": "4,6"}) == ["0", "1"]
    assert local_gpus({"ROCR_VISIBLE_DEVICES": ""}) == []
    assert local_gpus({"ROCR_VISIBLE_DEVICES": "4,6", "HIP_VISIBLE_DEVICES": "1"}) == ["1"]


def test_a_virtual_node_sees_its_own_gpus_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert visible(tmp_path, 2) == ["4,5", "6,7"]
    assert visible(tmp_path, 3) == ["4", "5", "6,7"]
    assert visible(tmp_path, 5) == ["-1"] * 5


def test_nothing_is_hidden_on_a_machine_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("hpctrain.launch.local.machine_gpus", list)
    assert visible(tmp_path, 2) == [None, None]


def test_too_few_gpus_are_said_or_refused() -> None:
    two = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert check_gpus(2, "auto", two) == check_gpus(2, "cuda", two) == check_gpus(4, "cpu", two) == []
    assert check_gpus(4, "auto", {"CUDA_VISIBLE_DEVICES": ""}) == []
    assert check_gpus(4, "auto", two) == [
        "2 GPUs for 4 virtual nodes: all nodes run on the CPU, with gloo; at most 2 virtual nodes can have a GPU each"
    ]
    with pytest.raises(InputError, match="found 2 GPUs for 4 virtual nodes; allowed here: at most 2 virtual nodes"):
        check_gpus(4, "cuda", two)
    with pytest.raises(InputError, match="found 0 GPUs for 1 virtual nodes; allowed here: device auto, or device cpu"):
        check_gpus(1, "cuda", {"CUDA_VISIBLE_DEVICES": "-1"})
