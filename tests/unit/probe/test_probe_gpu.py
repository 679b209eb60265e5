"""GPUs: what the driver says against what copies show; the measurement itself where there is a card."""

import pytest

from hpctrain.probe.system.gpu import open_nvml
from hpctrain.records.topology.evidence import NvlinkPeer
from hpctrain.worker.measure.gpu import GpuReader, confirm_p2p, load_gpus, nvlink_peers


@pytest.mark.parametrize(
    ("told", "cuda_allows", "copied", "found"),
    [
        ("ok", True, True, "ok"),
        ("unknown", True, True, "ok"),
        ("ok", True, False, "no"),
        ("ok", False, True, "no"),
        ("no", True, True, "no"),
    ],
)
def test_peer_access_is_what_nobody_contradicts(told, cuda_allows: bool, copied: bool, found: str) -> None:
    assert confirm_p2p(told, cuda_allows, copied) == found


def test_nvlinks_are_counted_by_peer() -> None:
    names = {"0000:4e:00.0": "cuda0", "0000:5f:00.0": "cuda1"}
    links = [("0000:5f:00.0", True), ("0000:5f:00.0", False), ("switch", True), ("0000:99:00.0", True)]

    assert nvlink_peers(links, names) == {
        "cuda1": NvlinkPeer(links=2, active=1),
        "switch": NvlinkPeer(links=1, active=1),
        "unknown": NvlinkPeer(links=1, active=1),
    }


def test_a_link_that_is_down_belongs_to_the_only_peer_there_is() -> None:
    assert nvlink_peers([("switch", True), (None, False)], {}) == {"switch": NvlinkPeer(links=2, active=1)}
    assert nvlink_peers([(None, False)], {}) == {"unknown": NvlinkPeer(links=1, active=0)}
    assert nvlink_peers([], {}) == {}


@pytest.mark.slow
@pytest.mark.requires("cuda")
def test_a_real_gpu_has_its_figures() -> None:
    with open_nvml():
        readers = [GpuReader(0)]
        load = load_gpus(readers)[0]
        device = readers[0].device("gpu", load, readers)

    assert max(device.flops.values()) > 1e12
    assert device.memory_bytes_per_s > 1e11
    assert device.host_to_device_bytes_per_s > 1e9
    assert device.device_to_host_bytes_per_s > 1e9
    assert device.driver
    assert device.pcie is not None
    assert device.pcie.under_load
    assert 10 < device.power_w < 2000
    assert device.p2p == {}
