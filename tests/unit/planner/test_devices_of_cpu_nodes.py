"""CPU nodes of several devices: the planner uses a topology only as it was measured."""

from __future__ import annotations

import pytest

from hpctrain.base.errors import InputError
from hpctrain.planner.devices.links import CPU_RING_FACTOR, message_s, ring_all_reduce_s
from hpctrain.planner.devices.pool import make_device_pool
from hpctrain.records.format.node_name import DeviceId


@pytest.mark.parametrize("wanted", [None, 2])
def test_all_devices_of_a_cut_node_are_used(wanted: int | None, topology, run) -> None:
    pool = make_device_pool(run(cluster={"device": "cpu", "devices_per_node": wanted}), topology(devices=2))
    expected = [f"local{node}:cpu{index}" for node in (0, 1) for index in (0, 1)]
    assert [str(device.device_id) for device in pool.devices] == expected


@pytest.mark.parametrize(("measured", "wanted"), [(1, 2), (2, 1), (2, 4)])
def test_cpus_that_were_measured_as_another_number_of_devices_are_refused(
    measured: int, wanted: int, topology, run
) -> None:
    words = f"cluster.devices_per_node: found {wanted}, .* as {measured} device.*; allowed: {measured}"
    with pytest.raises(InputError, match=words):
        make_device_pool(run(cluster={"devices_per_node": wanted}), topology(devices=measured))


def test_fewer_gpus_than_a_node_has_can_be_used(topology, run) -> None:
    pool = make_device_pool(run(cluster={"devices_per_node": 1}), topology(devices=2, kind="cuda"))
    assert [str(device.device_id) for device in pool.devices] == ["local0:cuda0", "local1:cuda0"]


def test_a_message_within_a_node_takes_what_was_measured(topology, run) -> None:
    made = topology((1, 1), devices=2)
    nodes = [node.model_copy(update={"intra_bytes_per_s": 2e9, "intra_alpha_s": 4e-5}) for node in made.nodes]
    links = make_device_pool(run(), made.model_copy(update={"nodes": nodes})).links
    ends = [DeviceId("local0:cpu0"), DeviceId("local0:cpu1")]
    assert links.between(*ends) == pytest.approx((4e-5, 5e-10))


@pytest.mark.parametrize(("kind", "factor"), [("cpu", CPU_RING_FACTOR), ("cuda", 1.0)])
def test_cores_that_send_are_those_that_receive_in_a_collective_within_a_node(
    kind: str, factor: float, topology, run
) -> None:
    nodes = topology((1, 1), devices=2, kind=kind)
    nodes = nodes.model_copy(update={"nodes": [node.model_copy(update={"intra_bytes_per_s": 2e9, "intra_alpha_s": 4e-5})
                                               for node in nodes.nodes]})  # fmt: skip
    links = make_device_pool(run(), nodes).links
    within = [DeviceId(f"local0:{kind}{index}") for index in range(2)]
    size = 1e8
    assert ring_all_reduce_s(links, within, size) == pytest.approx(2 * (4e-5 + factor * 5e-10 * size / 2))
    between = [DeviceId(f"local{node}:{kind}0") for node in range(2)]
    alpha, beta = links.between(*between)
    assert ring_all_reduce_s(links, between, size) == pytest.approx(2 * (alpha + beta * size / 2))
    assert message_s(links, within[:1], within[1:], size) == pytest.approx(4e-5 + 5e-10 * size)


def test_a_cpu_node_is_cut_into_64_devices_at_most(run) -> None:
    assert run(cluster={"device": "cpu", "devices_per_node": 64}).cluster.devices_per_node == 64
    with pytest.raises(ValueError, match="with device: cpu, allowed: 1 to 64"):
        run(cluster={"device": "cpu", "devices_per_node": 65})
    assert run(cluster={"device": "cuda", "devices_per_node": 65}).cluster.devices_per_node == 65
