"""What speaks against a topology now: age, nodes, drivers, version."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain import __version__
from hpctrain.base.clock import utc_text
from hpctrain.base.errors import FileError
from hpctrain.launch.preflight.checks import drop_stale_topology, local_driver_version, parse_driver_version, staleness
from hpctrain.records.history.run_log import Event
from hpctrain.records.topology.topology import Device, DeviceType, Node, Provenance, Topology, Verdict
from hpctrain.runs.folder import RunFolder

NOW = 1767225600.0  # 2026-01-01
DAY = 24 * 3600.0


def topology(
    *names: str, age_days: float = 0.0, driver: str | None = None, version: str = __version__, mode: str = "full"
) -> Topology:
    created = utc_text(NOW - age_days * DAY)
    device = Device(id="cuda0", type="gpu", driver=driver)
    return Topology(
        provenance=Provenance(version=version, created=created, transport="tcp", mode=mode),
        device_types={"gpu": DeviceType(kind="cuda", name="gpu")},
        nodes=[Node(id=name, addr=name, devices=[device]) for name in names],
    )


def test_nothing_is_said_of_a_young_file_of_these_nodes() -> None:
    assert staleness(topology("n1", "n2", age_days=6.9, driver="1.2"), ["n2", "n1"], {"n1": "1.2"}, NOW) == []
    assert staleness(topology("n1", age_days=6.9), None, {}, NOW) == []


def test_age_counts_from_the_days_that_are_allowed() -> None:
    words = staleness(topology("n1", age_days=9.2), None, {}, NOW)

    assert words == ["the topology is 9 days old, and 7 days are allowed; measure again with `hpctrain probe`"]
    assert staleness(topology("n1", age_days=9.2), None, {}, NOW, max_age_days=10) == []
    assert "12 h 0 min old, and 0.25 days" in staleness(topology("n1", age_days=0.5), None, {}, NOW, 0.25)[0]


def test_other_nodes_are_named_both_ways() -> None:
    words = staleness(topology("n1", "n2", "n3", "n7"), ["n1", "n4", "n5", "n6"], {}, NOW)

    assert words == [
        "the topology has no figures of n[4-6], which the run gets; measure again with `hpctrain probe`",
        "the topology also has n[2-3,7], which the run does not get: a plan on them is refused",
    ]


def test_a_driver_that_changed_is_told_where_both_are_known() -> None:
    old = topology("n1", "n2", "n3", driver="535.104.05")

    words = staleness(old, None, {"n1": "550.54", "n2": "550.54", "n3": "535.104.05"}, NOW)

    assert words == [
        "the driver of n[1-2] was 535.104.05 when it was measured and is 550.54; measure again with `hpctrain probe`"
    ]
    assert staleness(topology("n1"), None, {"n1": "550.54"}, NOW) == []


def test_another_version_of_hpctrain_is_told() -> None:
    assert (
        f"hpctrain 0.0.9 wrote the topology, this is {__version__}"
        in staleness(topology("n1", version="0.0.9"), None, {}, NOW)[0]
    )


def test_published_figures_do_not_age() -> None:
    published = topology("n1", age_days=900, version="0", mode="published")

    assert staleness(published, None, {}, NOW) == []
    assert len(staleness(published, ["n2"], {}, NOW)) == 2


def test_a_prior_is_told_and_never_serves_a_run(tmp_path: Path) -> None:
    prior = topology("n1", mode="prior")
    prior.write(tmp_path / "topology.json")

    assert ["nothing in the topology was measured" in words for words in staleness(prior, ["n1"], {}, NOW)] == [True]
    assert "are measured again" in drop_stale_topology(RunFolder(tmp_path), ["n1"], NOW)[-1]
    assert not (tmp_path / "topology.json").exists()


def test_a_time_that_is_none_is_a_mistake_in_the_file() -> None:
    odd = topology("n1")
    odd = odd.model_copy(update={"provenance": odd.provenance.model_copy(update={"created": "last week"})})

    with pytest.raises(FileError, match=r"provenance\.created: found 'last week'"):
        staleness(odd, None, {}, NOW)


def test_the_driver_is_read_from_its_own_words(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (x@y)\n"
        "GCC version:  gcc version 11.4.0 (Ubuntu)\n"
    )

    assert local_driver_version("n1", file) == {"n1": "550.54.15"}
    assert local_driver_version(None, file) == {}
    assert local_driver_version("n1", tmp_path / "absent") == {}
    assert parse_driver_version("nothing of the kind") is None


def test_an_attempt_keeps_a_topology_with_words_and_puts_an_old_one_aside(tmp_path: Path) -> None:
    folder, path = RunFolder(tmp_path), tmp_path / "topology.json"
    topology("n1", "n2", driver="1.0").write(path)

    kept = drop_stale_topology(folder, ["n1"], NOW, {"n1": "2.0"})
    assert path.exists()
    dropped = drop_stale_topology(folder, ["n1"], NOW + 8 * DAY)

    assert [words.split(",")[0].split(" was")[0] for words in kept] == ["the topology also has n2", "the driver of n1"]
    assert dropped[-1] == "the nodes are measured again; the topology found is now topology-before.json"
    assert [file.name for file in tmp_path.iterdir()] == ["topology-before.json"]
    assert drop_stale_topology(folder, ["n1"], NOW) == []


def test_whole_nodes_and_a_part_of_each_are_measured_anew(tmp_path: Path) -> None:
    folder, path = RunFolder(tmp_path), tmp_path / "topology.json"
    whole = topology("n1")
    part = whole.model_copy(update={"provenance": whole.provenance.model_copy(update={"shared": True})})
    for measured, shared, words in (
        (whole, True, "with whole nodes, and"),
        (part, False, "with a part of each node, "),
    ):
        measured.write(path)
        assert drop_stale_topology(folder, ["n1"], NOW, shared=not shared) == []
        assert f"the topology was measured {words}" in drop_stale_topology(folder, ["n1"], NOW, shared=shared)[0]
        assert not path.exists()


@pytest.mark.parametrize(("wanted", "kept"), [(None, True), (1, True), (2, False)])
def test_cpus_cut_into_another_number_of_devices_are_measured_again(
    wanted: int | None, kept: bool, tmp_path: Path
) -> None:
    cpu = Device(id="cpu0", type="cpu", flops={"fp32": 1e9})
    node = topology("n1").nodes[0].model_copy(update={"devices": [cpu]})
    types = {"cpu": DeviceType(kind="cpu", name="cpu")}
    topology("n1").model_copy(update={"nodes": [node], "device_types": types}).write(tmp_path / "topology.json")

    words = drop_stale_topology(RunFolder(tmp_path), ["n1"], NOW, devices_per_node=wanted)
    assert (words == [], (tmp_path / "topology.json").exists()) == (kept, kept)
    assert kept or words[0] == "found 1 CPU devices a node in the topology, and the run has 2"


def test_nodes_that_were_refused_are_measured_again(tmp_path: Path) -> None:
    refused = topology("n1").model_copy(update={"verdict": Verdict(status="refuse", exclude=["n1"])})
    refused.write(tmp_path / "topology.json")

    assert "are measured again" in drop_stale_topology(RunFolder(tmp_path), ["n1"], NOW)[-1]


@pytest.mark.parametrize("age_days", [0.5, -30.0])
def test_nodes_are_measured_again_once_after_a_fault_of_theirs(tmp_path: Path, age_days: float) -> None:
    folder, path = RunFolder(tmp_path), tmp_path / "topology.json"
    topology("n1", "n2", age_days=1).write(path)
    number = folder.begin_attempt(["n1", "n2"], NOW - 2 * DAY)
    folder.end_attempt(number, NOW - 2 * DAY, "before it was measured", 76, "infrastructure", faulty("n2"))
    number = folder.begin_attempt(["n1", "n2"], NOW - DAY / 2)
    folder.end_attempt(number, NOW - DAY / 2, "the program's own error", 1, "fatal")
    assert drop_stale_topology(folder, ["n1", "n2"], NOW) == []

    number = folder.begin_attempt(["n1", "n2"], NOW - DAY / 4)
    folder.end_attempt(number, NOW - DAY / 4, "it broke", 76, "infrastructure", faulty("n2"))
    # Of a clock that is wrong nothing can be said of what came first.
    topology("n1", "n2", age_days=age_days).write(path)
    words = drop_stale_topology(folder, ["n1", "n2"], NOW)
    assert words[-2] == (
        "attempt 2, after the topology was measured: n2 had this: a GPU has fallen off the bus; "
        "measure again with `hpctrain probe`"
    )
    assert words[-1].startswith("the nodes are measured again")

    topology("n1", "n2").write(path)
    assert drop_stale_topology(folder, ["n1", "n2"], NOW) == []


def faulty(node: str) -> list[Event]:
    data = {"node": node, "exit_code": 76, "fault": "gpu_lost"}
    return [Event(time_s=0, attempt=0, generation=0, node=node, kind="failed", reason="", data=data)]


def test_an_unreadable_topology_is_put_aside_too(tmp_path: Path) -> None:
    (tmp_path / "topology.json").write_text("{")

    words = drop_stale_topology(RunFolder(tmp_path), ["n1"], NOW)

    assert "not valid JSON" in words[0]
    assert not (tmp_path / "topology.json").exists()
