"""A plan that no job could obey is refused with the place of the mistake; so is a topology that contradicts itself."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.errors import FileError
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.plan.compression import NoCompression
from hpctrain.records.plan.plan import Plan
from hpctrain.records.topology.link_cost import INTRA_NODE_LATENCY_S, LinkCost
from hpctrain.records.topology.topology import Topology

PLAN: dict[str, Any] = {
    "pp": 2,
    "dp": 2,
    "tp": 1,
    "stages": [{"layers": [0, 3]}, {"layers": [3, 6]}],
    "replicas": [
        {"sequences": 8, "micro_batch": 2, "micro_batches": 4, "devices": [["a:cpu0"], ["b:cpu0"]]},
        {"sequences": 3, "micro_batch": 1, "micro_batches": 3, "devices": [["c:cpu0"], ["d:cpu0"]]},
    ],
    "ranks": ["a:cpu0", "c:cpu0", "b:cpu0", "d:cpu0"],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The plan with one value replaced: 'stages.0.layers'."""
    plan = copy.deepcopy(PLAN)
    target: Any = plan
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        target = target[part]
    target[last] = value
    return plan


def test_a_plan_of_an_earlier_version_calls_its_sequences_rows() -> None:
    replicas = [{"rows" if key == "sequences" else key: value for key, value in replica.items()}
                for replica in PLAN["replicas"]]  # fmt: skip
    assert Plan.from_json(PLAN | {"replicas": replicas}) == Plan.from_json(PLAN)


def test_the_plan_itself_is_valid() -> None:
    plan = Plan.from_json(PLAN)
    assert (plan.sequences, plan.layers, plan.world_size, plan.nodes) == (11, 6, 4, ["a", "c", "b", "d"])
    assert plan.mesh() == [[[0], [1]], [[2], [3]]]
    assert plan.table(0) is None


LEVELS = [
    {"level": "intra_node", "codec": {"mode": "bf16"}},
    {"level": "inter_node", "codec": {"mode": "int4"}},
]
"""Sums within nodes, then between them."""
FOUR: dict[str, Any] = {
    "pp": 1, "dp": 4, "tp": 1, "stages": [{"layers": [0, 6]}], "compression": LEVELS,
    "ranks": ["a:cpu0", "a:cpu1", "b:cpu0", "b:cpu1"],
    "replicas": [
        {"sequences": 1, "micro_batch": 1, "micro_batches": 1, "devices": [[device]]}
        for device in ("a:cpu0", "a:cpu1", "b:cpu0", "b:cpu1")
    ],
}  # fmt: skip


def test_sums_by_level_follow_from_the_nodes_of_the_replicas() -> None:
    plan = Plan.from_json(FOUR)
    assert (plan.level_replicas, plan.intra_node, plan.codec.mode) == (2, "bf16", "int4")
    flat = Plan.from_json(FOUR | {"compression": [{"codec": {"mode": "int4"}}]})
    assert (flat.level_replicas, flat.intra_node) == (1, "flat")
    assert flat.reduction_sha256 != plan.reduction_sha256


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compression": LEVELS[::-1]}, "found levels inter_node, intra_node"),
        ({"compression": LEVELS[:1]}, "found levels intra_node"),
        ({"compression": [LEVELS[0] | {"codec": {"mode": "int4"}}, LEVELS[1]]}, "found int4 with level intra_node"),
        ({"compression": [LEVELS[0], {"level": "inter_node", "codec": {"mode": "int4", "intra_node": "none"}}]},
         "codec.intra_node: found none"),
        ({"compression": [LEVELS[0], {"level": "inter_node", "codec": {"mode": "int4", "tensor_parallel": "bf16"}}]},
         "codec.tensor_parallel: found bf16"),
        ({"ranks": ["a:cpu0", "b:cpu0", "a:cpu1", "b:cpu1"]}, "ranks: with zero 0 and 2 levels"),
        ({"zero": 1, "shard": 1}, None),
        ({"replicas": [FOUR["replicas"][index] for index in (0, 2, 1, 3)],
          "ranks": ["a:cpu0", "b:cpu0", "a:cpu1", "b:cpu1"]}, "with 1 of 4 replicas on each node"),
    ],
)  # fmt: skip
def test_levels_that_the_nodes_do_not_have_are_refused(changes: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert Plan.from_json(FOUR | changes).shards == 1
        return
    with pytest.raises(FileError, match=words):
        Plan.from_json(FOUR | changes)


@pytest.mark.parametrize(
    ("ranks", "per_node"),
    [
        (["a:cpu0", "b:cpu0", "c:cpu0", "d:cpu0"], 1),
        (["a:cpu0", "a:cpu1", "b:cpu0", "b:cpu1"], 2),
        (["a:cpu0", "a:cpu1", "a:cpu2", "a:cpu3"], 4),
        (["a:cpu0", "b:cpu0", "b:cpu1", "c:cpu0"], None),
        (["a:cpu0", "b:cpu0", "a:cpu1", "b:cpu1"], None),
    ],
)
def test_sums_of_tensor_parallelism_in_bf16_need_nodes_with_equally_many_devices(
    ranks: list[str], per_node: int | None
) -> None:
    replicas = [{"sequences": 1, "micro_batch": 1, "micro_batches": 1, "devices": [ranks]}]
    value = {"pp": 1, "dp": 1, "tp": 4, "stages": [{"layers": [0, 6]}], "replicas": replicas, "ranks": ranks}
    assert "tensor_parallel_sums" not in Plan.from_json(value).to_json()  # plans of earlier versions are not edited
    value["tensor_parallel_sums"] = "bf16"
    if per_node is not None:
        assert Plan.from_json(value).tp_per_node == per_node
        return
    with pytest.raises(FileError, match="tensor_parallel_sums: found bf16 with a tensor-parallel group on nodes a, b"):
        Plan.from_json(value)


def test_only_messages_that_leave_a_node_are_rounded_and_all_of_a_stage_alike() -> None:
    value = changed("stages.0.messages", "int8")
    value["replicas"][1]["devices"] = [["c:cpu0"], ["c:cpu1"]]
    value["ranks"][3] = "c:cpu1"
    plan = Plan.from_json(value)
    assert [plan.messages(replica, 0) for replica in (0, 1)] == ["int8", "none"]
    assert plan.messages(0, 1) == "none"
    value = {"pp": 2, "dp": 1, "tp": 2, "stages": value["stages"], "ranks": ["a:cpu0", "a:cpu1", "a:cpu2", "b:cpu0"]}
    devices = [["a:cpu0", "a:cpu1"], ["a:cpu2", "b:cpu0"]]
    value["replicas"] = [{"sequences": 8, "micro_batch": 2, "micro_batches": 4, "devices": devices}]
    assert Plan.from_json(value).messages(0, 0) == "int8", "one of the two pairs leaves the node"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("actions", {"0": {"0": ["hello"]}}, r"actions\[0\]\[0\]: found 'hello'; an action is written like 0F3"),
        ("actions", {"2": {"0": ["0F0"]}}, r"actions: found replica 2, allowed: 0 to 1"),
        ("actions", {"1": {"5": ["0F0"]}}, r"actions\[1\]: found pipeline rank 5, allowed: 0 to 1"),
        ("stages.0.layers", [1, 3], r"stages\[0\]\.layers: found \[1, 3\), expected it to start at 0"),
        ("stages.1.layers", [4, 6], r"stages\[1\]\.layers: found \[4, 6\), expected it to start at 3"),
        ("stages.1.layers", [3, 2], r"stages\[1\]\.layers: found \[3, 2\)"),
        ("stages.1.messages", "bf16", r"stages\[1\]\.messages: found bf16; the last stage has no next one"),
        (
            "compression",
            [{"codec": {"mode": "none", "activations": "int8"}}],
            r"codec\.activations: found int8; a plan says it by stage",
        ),
        ("pp", 3, "stages: found 2, allowed: at least one for each of pp 3"),
        ("pp", 1, r"replicas\[0\]\.devices: its stages lie on 2 sets of devices, pp is 1"),
        ("dp", 1, "replicas: found 2, dp is 1"),
        ("tp", 2, r"replicas\[0\]\.devices\[0\]: found 1 devices, tp is 2"),
        ("replicas.0.sequences", 9, r"replicas\[0\]\.sequences: found 9, but micro_batch 2 × micro_batches 4 is 8"),
        ("replicas.1.devices", [["c:cpu0"]], r"replicas\[1\]\.devices: found 1 rows, there are 2 stages"),
        ("replicas.1.devices", [["a:cpu0"], ["d:cpu0"]], "replicas: a device is used twice: a:cpu0"),
        ("ranks", ["a:cpu0", "b:cpu0", "c:cpu0"], "ranks: found a:cpu0, b:cpu0, c:cpu0; expected exactly the devices"),
        ("ranks", ["a:cpu0", "a:cpu0", "c:cpu0", "d:cpu0"], "ranks: found a:cpu0, a:cpu0"),
        ("zero", 4, "zero: found 4; input should be 0, 1, 2 or 3"),
        ("schedule", "zigzag", "schedule: found 'zigzag'"),
        ("stagse", [], "stagse: unknown key; did you mean 'stages'"),
        ("stages.0.layer", 1, r"stages\[0\]\.layer: unknown key; did you mean 'layers'"),
    ],
)
def test_a_plan_that_cannot_be_obeyed_is_refused(path: str, value: Any, message: str) -> None:
    with pytest.raises(FileError, match=message):
        Plan.from_json(changed(path, value), "plan.json")


def test_stages_lie_on_the_same_ranks_in_every_replica() -> None:
    plan = copy.deepcopy(PLAN)
    plan["stages"] = [{"layers": [0, 2]}, {"layers": [2, 4]}, {"layers": [4, 6]}]
    plan["replicas"][0]["devices"] = [["a:cpu0"], ["b:cpu0"], ["a:cpu0"]]
    plan["replicas"][1]["devices"] = [["c:cpu0"], ["d:cpu0"], ["d:cpu0"]]
    with pytest.raises(FileError, match=r"replicas: their stages lie on pipeline ranks 0, 1, 0; 0, 1, 1; allowed: the"):
        Plan.from_json(plan)


def test_only_the_ends_of_a_model_may_have_no_block() -> None:
    ends = changed("stages", [{"layers": [0, 0]}, {"layers": [0, 0]}])
    assert Plan.from_json(ends).layers == 0
    middle = changed("stages", [{"layers": [0, 3]}, {"layers": [3, 3]}, {"layers": [3, 6]}])
    with pytest.raises(FileError, match=r"stages\[1\]\.layers: found no block"):
        Plan.from_json(middle)


def test_a_ring_all_reduce_sends_what_it_sends() -> None:
    assert NoCompression().wire_bytes(100.0, 1) == 0.0
    assert NoCompression().wire_bytes(100.0, 4) == 600.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"plan\.json: the file is empty"),
        ('{\n "pp": 1,\n}', r"plan\.json:\d: not valid JSON"),
        ("[]", r"plan\.json: found \[\]; keys are expected below it"),
        (json.dumps({**PLAN, "schema": "hpctrain.run/v1"}), r"schema: found 'hpctrain\.run/v1'; this version reads"),
    ],
)
def test_a_file_that_is_no_plan_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(FileError, match=message) as caught:
        Plan.read(tmp_path / "plan.json")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"plan\.json: no such file"):
        Plan.read(tmp_path / "plan.json")


TOPOLOGY: dict[str, Any] = {
    "provenance": {"version": "0", "created": "1970-01-01T00:00:00Z", "transport": "tcp"},
    "device_types": {"x86": {"kind": "cpu", "name": "x86"}},
    "nodes": [
        {
            "id": name,
            "addr": f"10.0.0.{number}",
            "devices": [{"id": "cpu0", "type": "x86"}, {"id": "cpu1", "type": "x86"}],
        }
        for number, name in enumerate("abc")
    ],
    "fabric": {
        "classes": [{"id": "fast", "alpha_s": 1e-5, "beta_s_per_byte": 1e-9, "pairs": 1}],
        "links": [
            {"a": "a", "b": "b", "ab": {"alpha_s": 1e-4, "beta_s_per_byte": 2e-9}, "ba": {}, "class": "fast"},
        ],
        "clusters": [{"id": "left", "members": ["a", "b"]}, {"id": "right", "members": ["c"]}],
    },
}


def test_a_link_costs_its_own_figures_then_its_class_then_the_slowest() -> None:
    cost = LinkCost(Topology.from_json(TOPOLOGY))
    assert cost.between("a", "b") == (1e-4, 2e-9)
    assert cost.between("b", "a") == (1e-5, 1e-9)
    assert cost.between("a", "c") == (1e-5, 1e-9)
    assert cost.between("a", "a")[0] == INTRA_NODE_LATENCY_S


def test_messages_over_the_training_backend_are_what_a_plan_pays_for() -> None:
    text = copy.deepcopy(TOPOLOGY)
    link, usual = text["fabric"]["links"][0], text["fabric"]["classes"][0]
    link["ab"]["backend"] = {"gloo": {"alpha_s": 3e-4, "beta_s_per_byte": 5e-9}}
    link["ba"]["backend"] = {
        "gloo": {"alpha_s": 3e-4, "beta_s_per_byte": 5e-9},
        "nccl": {"alpha_s": 6e-5, "beta_s_per_byte": 1e-10},
    }
    usual["backend"] = {"gloo": {"alpha_s": 2e-4, "beta_s_per_byte": 4e-9}}

    cost = LinkCost(Topology.from_json(text))

    assert cost.between("a", "b") == (3e-4, 5e-9)
    assert cost.between("b", "a") == (6e-5, 1e-10)
    assert cost.between("a", "c") == (2e-4, 4e-9)


def test_some_of_the_nodes_keep_their_measurements() -> None:
    part = Topology.from_json(TOPOLOGY).only(["a", "c"])
    assert part.device_ids() == ["a:cpu0", "a:cpu1", "c:cpu0", "c:cpu1"]
    assert part.fabric.links == []
    assert [cluster.members for cluster in part.fabric.clusters] == [["a"], ["c"]]
    assert part.device(DeviceId("c:cpu1")).type == "x86"
    for place in ("b:cpu0", "a:cpu9"):
        with pytest.raises(KeyError):
            part.device(DeviceId(place))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"id": "b"', '"id": "a"', "nodes: name 'a' is given twice"),
        ('"id": "cpu1"', '"id": "cpu0"', r"nodes\[0\]\.devices: name 'cpu0' is given twice"),
        ('"id": "right"', '"id": "left"', r"fabric\.clusters: id 'left' is given twice"),
        ('["c"]', '["d"]', r"fabric\.clusters\[1\]\.members: 'd' is not a node of this file"),
        ('"b": "b"', '"b": "a"', r"fabric\.links\[0\]: found 'a' twice; expected two nodes"),
        ('"type": "x86"', '"type": "arm"', r"nodes\[0\]\.devices\[0\]\.type: 'arm' is not in device_types"),
        ('"b": "b"', '"b": "z"', r"fabric\.links\[0\]: 'z' is not a node of this file"),
        ('"kind": "cpu"', '"kindd": "cpu"', r"device_types\.x86\.kindd: unknown key; did you mean 'kind'"),
        ('"kind": "cpu"', '"kind": "tpu"', r"device_types\.x86\.kind: found 'tpu'"),
        ('"alpha_s": 0.0001', '"alpha": 0.0001', r"fabric\.links\[0\]\.ab\.alpha: unknown key; did you mean 'alpha_s'"),
    ],
)
def test_a_topology_that_contradicts_itself_is_refused(old: str, new: str, message: str) -> None:
    text = json.dumps(TOPOLOGY)
    assert old in text
    with pytest.raises(FileError, match=message):
        Topology.from_json(json.loads(text.replace(old, new)))


def test_what_was_not_measured_is_absent() -> None:
    written = json.dumps(Topology.from_json(TOPOLOGY).to_json())
    assert "null" not in written
    assert "loaded_bytes_per_s" not in written
