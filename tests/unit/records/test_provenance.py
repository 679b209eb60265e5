"""What differs between attempts is told once, with its nodes; a package can be installed again from its line."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hpctrain.records.history.provenance import (
    InstalledPackage,
    NodeEnvironment,
    SoftwareVersions,
    environment_changes,
    mixed_versions,
)


def line(attempt: int, node: str, packages: dict[str, str] | None = None, **facts: Any) -> NodeEnvironment:
    of_node = {name: facts.pop(name) for name in ("driver", "gpus", "network") if name in facts}
    software = SoftwareVersions(**{"hpctrain": "0.1.0", "python": "3.11.7", "torch": "2.7.1", **facts})
    return NodeEnvironment(attempt=attempt, node=node, time_s=1.0, software=software, packages=packages, **of_node)


def test_another_version_in_a_later_attempt_is_a_change() -> None:
    lines = [line(0, "n1"), line(0, "n2"), line(1, "n1", hpctrain="0.2.0"), line(1, "n2", hpctrain="0.2.0")]
    assert environment_changes(lines, 0) == []
    assert environment_changes(lines, 1) == ["hpctrain 0.1.0 → 0.2.0"]


def test_a_change_on_some_nodes_names_them() -> None:
    before = [line(0, f"n{number}", driver="535.1") for number in range(4)]
    after = [line(2, f"n{number}", driver="550.2" if number > 1 else "535.1") for number in range(4)]
    assert environment_changes([*before, *after], 2) == ["driver 535.1 → 550.2 on n[2-3]"]


def test_a_value_that_any_node_of_the_first_attempt_had_is_no_change() -> None:
    before = [line(0, "a1", gpus=["A100"], kernel="5.14"), line(0, "h1", gpus=["H100"], kernel="6.1")]
    assert environment_changes([*before, line(1, "h9", gpus=["H100"], kernel="5.14")], 1) == []


def test_what_is_not_known_is_no_change() -> None:
    assert environment_changes([line(0, "n1", nccl="2.27"), line(1, "n1", torch=None, driver="550.2")], 1) == []


def test_packages_are_named_up_to_five() -> None:
    before = {f"p{number}": "1" for number in range(7)} | {"torch": "2.7.1", "same": "1"}
    after = {f"p{number}": "2" for number in range(1, 7)} | {"torch": "2.8.0", "same": "1", "new": "3"}
    lines = [line(0, "n1", packages=before), line(1, "n1", packages=after)]
    assert environment_changes(lines, 1) == [
        "new not installed → 3", "p0 1 → not installed", "p1 1 → 2", "p2 1 → 2", "p3 1 → 2", "3 more packages"
    ]  # fmt: skip


def test_software_that_differs_between_nodes_of_one_attempt_is_named_with_its_nodes() -> None:
    lines = [line(0, "n1"), line(0, "n2", torch="2.8.0"), line(0, "n3", torch="2.8.0"), line(1, "n1")]
    assert mixed_versions(lines, 0) == ["torch 2.7.1 on n1, 2.8.0 on n[2-3]"]
    assert mixed_versions(lines, 1) == []


def test_the_last_line_of_a_node_counts() -> None:
    assert mixed_versions([line(0, "n1", torch="2.6.0"), line(0, "n1"), line(0, "n2")], 0) == []


@pytest.mark.parametrize(
    ("fields", "requirement"),
    [
        ({}, "a==1.0"),
        ({"url": "https://host/a.git", "commit": "0a1b"}, "a @ git+https://host/a.git@0a1b"),
        ({"url": "file:///src/a", "editable": True}, "-e file:///src/a  # a==1.0"),
        ({"url": "file:///a.whl", "sha256": "0" * 64}, f"a @ file:///a.whl#sha256={'0' * 64}"),
    ],
)
def test_a_package_becomes_a_line_that_installs_it_again(fields: dict[str, Any], requirement: str) -> None:
    assert InstalledPackage(name="a", version="1.0", **fields).requirement() == requirement


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "a\n--index-url=http://evil"},
        {"version": "1 --hash"},
        {"url": "https://host/a b"},
        {"url": "https://host/a\n-e ."},
        {"commit": "main; rm"},
    ],
)
def test_no_text_of_a_package_adds_a_line_or_an_option(fields: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        InstalledPackage(**{"name": "a", "version": "1.0", **fields})
