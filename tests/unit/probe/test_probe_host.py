"""The limit of a cgroup counts where it is below what the machine has free."""

from pathlib import Path

from hpctrain.probe.system.host import cgroup_memory_room, cpu_name, interface_of, usable_memory_bytes


def group(mount: Path, path: str, limit: str, usage: int) -> None:
    folder = mount / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{usage}\n")


def test_the_tightest_limit_up_the_tree_counts(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/job_1/step_0\n")
    group(tmp_path, "job_1", "1000", 300)
    group(tmp_path, "job_1/step_0", "5000", 100)

    assert cgroup_memory_room(own, tmp_path) == 700


def test_the_word_max_is_no_limit(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/job_1\n")
    group(tmp_path, "job_1", "max", 300)

    assert cgroup_memory_room(own, tmp_path) is None


def test_version_1_is_read_and_its_huge_number_is_no_limit(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("5:cpu:/x\n4:memory:/job\n")
    folder = tmp_path / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("4096")
    (folder / "memory.usage_in_bytes").write_text("96")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(2**63 - 4096))

    assert cgroup_memory_room(own, tmp_path) == 4000


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_memory_room(tmp_path / "absent", tmp_path) is None
    assert usable_memory_bytes() > 2**20


def test_the_processor_is_named(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.0 GHz\n")

    assert cpu_name(cpuinfo) == "Some CPU @ 2.0 GHz"
    assert cpu_name(tmp_path / "absent")


def test_the_interface_is_read_back_from_the_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.5")
    assert interface_of("192.0.2.1") is None
