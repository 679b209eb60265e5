"""What a machine says of itself, and clocks that are apart."""

from pathlib import Path

import pytest

from hpctrain.probe.analyse.assemble import clock_offsets
from hpctrain.probe.measure.figures import PairFigures
from hpctrain.probe.measure.outcome import PairResult
from hpctrain.probe.protocol.pair_measurement import cpu_demand_s
from hpctrain.probe.system.host import active_ports, host_facts, resolve
from hpctrain.records.topology.link import Latency


def test_loopback_is_up_with_its_address_and_packet_size() -> None:
    facts = host_facts("localhost")

    assert "127.0.0.1" in facts.interfaces["lo"]
    assert facts.mtu["lo"] > 1000
    assert facts.hostname_resolves_to in ("127.0.0.1", "::1")
    assert facts.clock_offset_s is None


def test_a_name_that_nobody_knows_leads_nowhere() -> None:
    assert resolve("no-such-name.invalid") is None


def test_only_active_ports_count(tmp_path: Path) -> None:
    for device, port, state in [("mlx5_0", "1", "4: ACTIVE\n"), ("mlx5_1", "1", "1: DOWN\n"), ("mlx5_1", "2", "")]:
        folder = tmp_path / device / "ports" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(state)

    assert active_ports(tmp_path) == ["mlx5_0/1"]
    assert active_ports(tmp_path / "absent") == []


def test_time_in_the_queue_for_a_processor_counts(tmp_path: Path) -> None:
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("1500000000 500000000 12\n")

    assert cpu_demand_s(schedstat) == 2.0
    assert 0 <= cpu_demand_s(tmp_path / "absent") < 1000


def pair(a: str, b: str, at_a: tuple[float, float] | None, at_b: tuple[float, float] | None) -> PairResult:
    """The offset of b from a as seen at a, that of a from b as seen at b, each with its error."""

    def side(seen: tuple[float, float] | None) -> PairFigures:
        offset, error = seen or (None, None)
        latency = Latency(min=1e-5, p50=1e-5, p95=1e-5)
        return PairFigures(latency=latency, bytes_per_s=1.0, n=1, clock_offset_s=offset, clock_error_s=error)

    return PairResult(a, b, False, 1, side(at_a), side(at_b))


def test_offsets_are_against_the_first_node_by_the_surest_measurement() -> None:
    pairs = [
        pair("n0", "n1", (2.0, 1e-3), (-2.1, 1e-4)),  # n1's own view is the surer one
        pair("n1", "n2", (0.5, 1e-4), None),
        pair("n0", "n2", (2.55, 1e-3), None),
        pair("n2", "n3", None, (1.0, 1e-4)),
    ]

    found = clock_offsets(["n0", "n1", "n2", "n3", "n4"], pairs)

    assert found["n0"] == (0.0, 0.0)
    assert found["n1"] == (2.1, 1e-4)
    assert found["n2"] == (2.55, 1e-3)  # measured against the first node itself
    assert found["n3"][0] == pytest.approx(1.55)
    assert "n4" not in found
