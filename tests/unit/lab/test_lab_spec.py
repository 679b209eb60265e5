"""The lab's spec file: what it may say, and how a mistake in it is told."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import FileError
from hpctrain.lab.spec import LabSpec, rate_bits_per_s, read_lab_spec

EVERYTHING = """
network: 198.19.0.0/16
nodes:
  - name: fast
    rate: 400mbit
  - {name: slow, rate: 50mbit, cpu_share: 0.25, cpus: 1}
  - {name: far, memory_bytes: 1073741824}
rate: null
cpus: 4
switches:
  - nodes: [far]
    uplink_rate: 100mbit
partitions:
  - {name: batch, default: true, nodes: "fast,slow", max_time: 1-00:00:00, default_time: 10}
  - {name: urgent, priority_tier: 9, preempt_mode: off}
slurm: {preempt_send_user_signal: false, slurmd_timeout_s: 30}
"""


def spec_of(tmp_path, text: str) -> LabSpec:
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    return read_lab_spec(path)


def test_nothing_said_is_four_nodes_with_two_partitions(tmp_path):
    spec = spec_of(tmp_path, "schema: hpctrain.lab/v1\n")
    assert [node.name for node in spec.nodes] == ["node0", "node1", "node2", "node3"]
    assert [(each.name, each.priority_tier, each.default) for each in spec.partitions] == [
        ("low", 1, True),
        ("high", 10, False),
    ]
    assert (spec.slurm.slurmd_timeout_s, spec.slurm.cred_expire_s) == (10, 10)


def test_everything_can_be_said_and_is_read_back(tmp_path):
    spec = spec_of(tmp_path, EVERYTHING)
    assert [spec.rate_of(node) for node in spec.nodes] == ["400mbit", "50mbit", None]
    assert [spec.cpu_share_of(node) for node in spec.nodes] == [None, 0.25, None]
    assert spec.partitions[0].nodes == ["fast", "slow"]
    assert spec.partitions[1].preempt_mode == "off"
    assert str(spec.controller()) == "198.19.0.1"
    assert str(spec.address(2)) == "198.19.0.12"
    spec.write(tmp_path / "lab.json")
    assert LabSpec.read(tmp_path / "lab.json") == spec


@given(st.integers(1, 200))
def test_a_number_of_nodes_names_and_addresses_them(count):
    spec = LabSpec.from_json({"nodes": count})
    addresses = [str(spec.address(index)) for index in range(count)]
    assert [node.name for node in spec.nodes] == [f"node{index}" for index in range(count)]
    assert len({*addresses, str(spec.controller())}) == count + 1
    assert all(address.startswith("198.18.7.") and not address.endswith(".255") for address in addresses)


@given(st.integers(1, 400), st.sampled_from([("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)]))
def test_rates_are_those_of_tc(number, unit):
    text = f"{number}{unit[0]}"
    if number * unit[1] < 8e3:
        with pytest.raises(ValueError, match="at least 8kbit"):
            rate_bits_per_s(text)
    else:
        assert rate_bits_per_s(text) == number * unit[1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nodes: 0", "lab.yaml:1: nodes: found 0; allowed: 1 to 500 nodes"),
        ("nodes: 300", "lab.yaml:1: nodes: found 300; the network has room for 245 nodes; make it larger"),
        ("nodes: [{name: Node0}]", "lab.yaml:1: nodes[0].name: found 'Node0'"),
        ("nodes: [{name: a}, {name: a}]", "lab.yaml:1: nodes: a: named twice among the nodes"),
        ("nodes: 2\nrate: fast", "lab.yaml:2: rate: found 'fast'; allowed: a number with kbit, mbit or gbit"),
        ("nodes: 2\nrate: 1kbit", "lab.yaml:2: rate: found '1kbit'; at least 8kbit"),
        ("network: 10.0.0.0/8", "allowed: a network within 198.18.0.0/15"),
        ("network: home", "allowed: a network within 198.18.0.0/15, for instance 198.18.7.0/24"),
        ("nodes: 2\nswitches: [{nodes: 'node[1-2]'}]", "lab.yaml:2: switches: no node is called node2; there are: "),
        ("switches: [{nodes: node1}, {nodes: node1}]", "switches: node1: named twice among the switches"),
        ("switches: [{nodes: 'node[1-'}]", "allowed: node names, or a set of them such as node[0-2]"),
        ("partitions: [{name: p}]", "exactly one partition must have `default: true`"),
        ("partitions: [{name: p, default: true, max_time: 1 h}]", "partitions[0].max_time: found '1 h'"),
        ("slurm: {cred_expires_s: 3}", "slurm.cred_expires_s: unknown key; did you mean 'cred_expire_s'?"),
        ("- a", "found no keys; a lab of four nodes is `nodes: 4`"),
    ],
)
def test_a_mistake_names_line_field_and_what_is_allowed(tmp_path, text, told):
    with pytest.raises(FileError) as caught:
        spec_of(tmp_path, text)
    assert told in str(caught.value)


def test_a_missing_file_says_that_none_is_needed(tmp_path):
    with pytest.raises(FileError, match=r"lab\.yaml: no such file; `hpctrain lab up --nodes N` needs none"):
        read_lab_spec(tmp_path / "lab.yaml")


def test_every_key_is_documented():
    schema = json.loads(json.dumps(LabSpec.model_json_schema(by_alias=True)))
    for owner in (schema, *schema["$defs"].values()):
        for key, value in owner["properties"].items():
            reference = value.get("$ref", "").rpartition("/")[2]
            assert value.get("description") or schema["$defs"][reference]["description"], key
