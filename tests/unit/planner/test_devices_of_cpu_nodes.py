"""CPU nodes of several devices: the planner uses a topology only as it was measured."""

from __future__ import annotations

import pytest

from hpctrain.base.errors import InputError
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


def test_a_cpu_node_is_cut_into_64_devices_at_most(run) -> None:
    assert run(cluster={"device": "cpu", "devices_per_node": 64}).cluster.devices_per_node == 64
    with pytest.raises(ValueError, match="with device: cpu, allowed: 1 to 64"):
        run(cluster={"device": "cpu", "devices_per_node": 65})
    assert run(cluster={"device": "cuda", "devices_per_node": 65}).cluster.devices_per_node == 65
