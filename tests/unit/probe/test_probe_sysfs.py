"""The kernel's device tree: PCI links, NUMA nodes, the nearest network card, and errors."""

from pathlib import Path

import pytest

from hpctrain.probe.system.gpu import nearest_nic, numa_node, pci_path, pcie_link
from hpctrain.probe.system.host import memory_errors, own_numa_node
from hpctrain.records.topology.evidence import PcieLink

GPU, FAR_GPU = "0000:4e:00.0", "0000:c1:00.0"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two host bridges: below the first, a switch with a GPU and mlx5_0, and eth0 beside it; below the second, on the
    other NUMA node, a GPU and mlx5_1."""
    switch = "devices/pci0000:4c/0000:4c:01.0/0000:4d:00.0"
    link = {"current_link_speed": "16.0 GT/s PCIe", "current_link_width": "16"}
    most = {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16"}
    device(tmp_path, f"{switch}/0000:4d:01.0/{GPU}", numa_node="0", **link, **most)
    device(tmp_path, f"{switch}/0000:4d:02.0/0000:4f:00.0", "infiniband/mlx5_0", numa_node="0")
    device(tmp_path, "devices/pci0000:4c/0000:4c:09.0/0000:50:00.0", "net/eth0", numa_node="0")
    device(tmp_path, f"devices/pci0000:c0/0000:c0:01.0/{FAR_GPU}", numa_node="1")
    device(tmp_path, "devices/pci0000:b0/0000:b0:01.0/0000:b1:00.0", "infiniband/mlx5_1", numa_node="1")
    (tmp_path / "class/net/lo").mkdir()
    return tmp_path


def device(sysfs: Path, path: str, name: str = "", **files: str) -> None:
    folder = sysfs / path
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(text + "\n")
    by_address = sysfs / "bus/pci/devices"
    by_address.mkdir(parents=True, exist_ok=True)
    (by_address / folder.name).symlink_to(folder)
    if name:
        inner, link = folder / name, sysfs / "class" / name
        inner.mkdir(parents=True)
        (inner / "device").symlink_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(inner)


def test_the_link_now_and_at_best(sysfs: Path) -> None:
    assert pcie_link(GPU, sysfs) == PcieLink(generation=4, width=16, generation_max=5, width_max=16)
    assert pcie_link("0000:4E:00.0", sysfs) is not None
    assert pcie_link(FAR_GPU, sysfs) is None
    assert pcie_link("0000:ff:00.0", sysfs) is None


def test_an_unknown_speed_is_no_link(sysfs: Path) -> None:
    (sysfs / "bus/pci/devices" / GPU / "current_link_speed").write_text("Unknown\n")

    assert pcie_link(GPU, sysfs) is None


def test_numa_nodes_and_machines_that_have_none(sysfs: Path) -> None:
    assert (numa_node(GPU, sysfs), numa_node(FAR_GPU, sysfs)) == (0, 1)
    (sysfs / "bus/pci/devices" / GPU / "numa_node").write_text("-1\n")
    assert numa_node(GPU, sysfs) is None
    assert numa_node("0000:ff:00.0", sysfs) is None


def test_the_card_behind_the_same_switch_is_the_nearest(sysfs: Path) -> None:
    assert nearest_nic(GPU, sysfs) == "mlx5_0"


def test_a_card_on_the_same_numa_node_is_near_enough_and_one_on_another_is_not(sysfs: Path) -> None:
    assert nearest_nic(FAR_GPU, sysfs) == "mlx5_1"
    (sysfs / "bus/pci/devices/0000:b1:00.0/numa_node").write_text("0\n")
    assert nearest_nic(FAR_GPU, sysfs) is None


def test_the_way_to_a_device_has_one_address_for_each_switch(tmp_path: Path) -> None:
    way = ("0000:4c:01.0", "0000:4d:00.0", "0000:4e:04.0", "0000:4f:00.0")
    real = tmp_path.joinpath("devices", "pci0000:4c", *way)
    real.mkdir(parents=True)
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices" / way[-1]).symlink_to(real)
    (tmp_path / "bus/pci/devices" / way[0]).symlink_to(real.parents[2])

    assert pci_path("0000:4F:00.0", tmp_path) == [way[1], way[3]]
    assert pci_path(way[0], tmp_path) == [way[0]]
    assert pci_path("0000:ff:00.0", tmp_path) is None


def test_memory_errors_are_summed_and_absent_without_a_counter(tmp_path: Path) -> None:
    assert memory_errors(tmp_path) is None
    for index, count in enumerate((2, 3)):
        folder = tmp_path / f"devices/system/edac/mc/mc{index}"
        folder.mkdir(parents=True)
        (folder / "ue_count").write_text(f"{count}\n")
    assert memory_errors(tmp_path) == 5


def test_a_process_on_one_numa_node_and_one_on_several(tmp_path: Path) -> None:
    for index, cpus in enumerate(("0-3,8", "4-7")):
        folder = tmp_path / f"devices/system/node/node{index}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")

    assert own_numa_node([8, 0], tmp_path) == 0
    assert own_numa_node([5], tmp_path) == 1
    assert own_numa_node([3, 4], tmp_path) is None
    assert own_numa_node([5], tmp_path / "absent") is None
