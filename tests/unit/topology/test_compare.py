"""What changed between two files."""

import io

import pytest
from rich.console import Console

from hpctrain.base.package_data import package_data_path
from hpctrain.records.topology.topology import Health, Topology
from hpctrain.topology.compare import differences
from hpctrain.topology.view import render_differences, summary


def laptop() -> Topology:
    return Topology.read(package_data_path("topology", "laptop-4-nodes.json"))


def test_a_file_does_not_differ_from_itself() -> None:
    assert differences(laptop(), laptop(), 0.0) == []


def test_a_changed_figure_and_a_lost_node_are_found() -> None:
    before = laptop()
    slower = before.nodes[0].devices[0].model_copy(update={"memory_bytes_per_s": 1.0})
    node = before.nodes[0].model_copy(update={"devices": [slower]})
    after = before.only(["local0", "local1"]).model_copy(update={"nodes": [node, before.nodes[1]]})

    found = differences(before, after, 0.1)

    assert [(entry.group, entry.what, entry.after) for entry in found] == [
        ("nodes", "local2", None),
        ("nodes", "local3", None),
        ("devices", "local0:cpu0 memory bandwidth", 1.0),
    ]
    assert found[2].ratio < 0.1
    assert found[2].better is False


def test_health_and_drivers_are_compared_and_latency_is_better_when_it_falls() -> None:
    before = laptop()
    device = before.nodes[0].devices[0].model_copy(update={"driver": "535.104"})
    sick = before.nodes[1].model_copy(update={"health": Health(verdict="bad")})
    old = before.model_copy(
        update={"nodes": [before.nodes[0].model_copy(update={"devices": [device]}), *before.nodes[1:]]}
    )
    newer = device.model_copy(update={"driver": "550.54"})
    link = before.fabric.links[0]
    latency = link.ab.latency_s.model_copy(update={"p50": link.ab.latency_s.p50 / 3})
    quick = link.model_copy(update={"ab": link.ab.model_copy(update={"latency_s": latency})})
    new = before.model_copy(
        update={
            "nodes": [before.nodes[0].model_copy(update={"devices": [newer]}), sick, *before.nodes[2:]],
            "fabric": before.fabric.model_copy(update={"links": [quick, *before.fabric.links[1:]]}),
        }
    )

    found = differences(old, new, 0.1)

    assert [(entry.group, entry.what, entry.better) for entry in found] == [
        ("health", "local1", False),
        ("drivers", "local0:cpu0", None),
        ("links", "local0 -> local1 latency", True),
    ]
    assert summary(found) == "health: 1 worse; drivers: 1 other; links: 1 better"


def test_many_changes_are_shown_largest_first_and_counted() -> None:
    before = laptop()
    halved = [
        link.model_copy(
            update={
                side: getattr(link, side).model_copy(
                    update={
                        "isolated_bytes_per_s": getattr(link, side).isolated_bytes_per_s / (2 + number),
                        "loaded_bytes_per_s": getattr(link, side).loaded_bytes_per_s / 1.5,
                    }
                )
                for side in ("ab", "ba")
            }
        )
        for number, link in enumerate(before.fabric.links)
    ]
    after = before.model_copy(update={"fabric": before.fabric.model_copy(update={"links": halved})})
    console = Console(width=80, file=io.StringIO())

    console.print(render_differences(differences(before, after, 0.1), 0.1))

    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    assert lines[2].startswith("local2 -> local3 bandwidth ")
    assert lines[2].endswith("↓ 0.14")
    assert lines[-2:] == ["and 4 smaller changes; --json has all", "links: 24 worse"]


def test_a_link_that_one_file_leaves_to_its_class_is_compared_as_the_planner_takes_it() -> None:
    before = laptop()
    links, (network,) = before.fabric.links, before.fabric.classes
    slow = links[0].ab.model_copy(update={"alpha_s": network.alpha_s, "beta_s_per_byte": 4 * network.beta_s_per_byte})
    usual = links[0].model_copy(update={"ab": slow, "ba": slow.model_copy(update={"beta_s_per_byte": 1e-10})})
    old = before.model_copy(update={"fabric": before.fabric.model_copy(update={"links": []})})
    new = before.model_copy(update={"fabric": before.fabric.model_copy(update={"links": [usual]})})

    found = differences(old, new, 0.1)

    assert [(entry.what, entry.better) for entry in found] == [
        ("local0 -> local1 bandwidth under load", False),
        ("local1 -> local0 bandwidth under load", True),
    ]
    assert found[0].ratio == pytest.approx(0.25)


def test_the_node_that_the_worse_links_have_in_common_is_named() -> None:
    before = laptop()
    links = []
    for link in before.fabric.links:
        half = link.ab.model_copy(update={"isolated_bytes_per_s": link.ab.isolated_bytes_per_s / 2})
        links.append(link.model_copy(update={"ab": half}) if "local2" in (link.a, link.b) else link)
    after = before.model_copy(update={"fabric": before.fabric.model_copy(update={"links": links})})

    assert summary(differences(before, after, 0.1)) == "links: 3 worse (3 of the worse at local2)"
