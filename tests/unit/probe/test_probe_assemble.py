"""From an outcome to a topology with its verdict: pure, so built by hand."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.probe.analyse.assemble import assemble
from hpctrain.probe.measure.devices import DeviceReport
from hpctrain.probe.measure.figures import PairFigures
from hpctrain.probe.measure.outcome import JoinedNode, PairResult, ProbeOutcome
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.records.topology.evidence import HostFacts, PcieLink
from hpctrain.records.topology.link import BackendFigures, Latency
from hpctrain.records.topology.link_cost import LinkCost
from hpctrain.records.topology.topology import Device, DeviceType, Topology

RATE = 1e9
LATENCY = 1e-5


def side(rate: float = RATE, latency: float = LATENCY) -> PairFigures:
    return PairFigures(latency=Latency(min=latency / 2, p50=latency, p95=latency * 2), bytes_per_s=rate, n=8)


def report(flops: float = 1e12, kind: str = "gpu") -> DeviceReport:
    device = Device(id="cuda0", type=kind, flops={"bf16": flops}, memory_bytes=8e9, memory_bytes_per_s=1e11)
    return DeviceReport(devices=[device], device_types={kind: DeviceType(kind="cuda", name=kind.upper())})


def outcome(n: int = 4, slow_node: str = "", slow_flops: str = "", rate: float = 0.5 * RATE) -> ProbeOutcome:
    names = [f"n{index}" for index in range(n)]
    made = ProbeOutcome(names, rounds_done=n - 1, rounds_planned=n - 1, wall_s=1.25)
    for name in names:
        made.joined[name] = JoinedNode(addr=f"10.0.0.{len(made.joined)}", port=5000, iface="ib0", host=name)
        made.devices[name] = report(5e11 if name == slow_flops else 1e12)
    for a, b in itertools.combinations(names, 2):
        speed = rate if slow_node in (a, b) else RATE
        made.add([PairResult(a, b, False, n // 2, side(speed), side(speed))], ProbeSettings().bulk_bytes)
    return made


def topology(made: ProbeOutcome, **settings) -> Topology:
    return assemble(made, ProbeSettings(**settings), wall=0.0, job_id="42")


def test_a_healthy_allocation_goes() -> None:
    made = topology(outcome(), seed=7)

    assert made.verdict.status == "go"
    assert [node.health.verdict for node in made.nodes] == ["ok"] * 4
    assert made.provenance.created == "1970-01-01T00:00:00Z"
    assert (made.provenance.rounds_done, made.provenance.seed, made.provenance.job_id) == (3, 7, "42")
    assert made.provenance.loopback is False
    assert Topology.from_json(made.to_json()) == made


def test_loopback_is_said() -> None:
    made = topology(outcome(), loopback=True)

    assert made.provenance.loopback is True
    assert [entry.id for entry in made.fabric.classes] == ["loopback"]


def test_each_direction_is_latency_of_its_sender_and_bandwidth_of_its_receiver() -> None:
    made = outcome(2)
    made.pairs = [PairResult("n0", "n1", False, 1, at_a=side(1e8, 1e-6), at_b=side(2e8, 3e-6))]

    link = topology(made).fabric.links[0]

    assert (link.ab.latency_s.p50, link.ab.isolated_bytes_per_s) == (1e-6, 2e8)
    assert (link.ba.latency_s.p50, link.ba.isolated_bytes_per_s) == (3e-6, 1e8)
    assert link.ab.beta_s_per_byte == pytest.approx(1 / 2e8)
    assert link.ba.alpha_s == pytest.approx(3e-6, rel=1e-3)


def test_a_slow_link_keeps_its_start_up_time() -> None:
    made = outcome(2)
    made.pairs = [PairResult("n0", "n1", False, 1, side(1e6, 4e-6), side(1e6, 4e-6))]

    assert topology(made).fabric.links[0].ab.alpha_s == pytest.approx(4e-6, rel=1e-3)


def test_alone_and_loaded_are_two_figures_and_the_model_takes_the_loaded_one() -> None:
    made = outcome(2)
    made.pairs = [
        PairResult("n0", "n1", True, 1, side(4e8), side(4e8)),
        PairResult("n0", "n1", False, 2, side(1e8), side(1e8)),
    ]

    figures = topology(made).fabric.links[0].ab

    assert (figures.isolated_bytes_per_s, figures.loaded_bytes_per_s, figures.concurrency) == (4e8, 1e8, 1)
    assert figures.beta_s_per_byte == pytest.approx(1e-8)


def test_a_pair_that_was_never_alone_has_only_a_loaded_bandwidth() -> None:
    links = topology(outcome()).fabric.links
    assert {(link.ab.isolated_bytes_per_s, link.ab.loaded_bytes_per_s) for link in links} == {(None, RATE)}
    assert {link.ba.concurrency for link in links} == {2}


def test_a_lost_node_is_bad_and_left_out_and_its_links_are_absent() -> None:
    made = outcome()
    made.lost["n2"] = "no answer in round 2 within 16 s"
    made.pairs = [pair for pair in made.pairs if "n2" not in (pair.a, pair.b)]
    del made.devices["n2"]

    found = topology(made)

    assert found.verdict.status == "warn"
    assert found.verdict.exclude == ["n2"]
    assert found.node("n2").health.verdict == "bad"
    assert found.node("n2").health.reasons[0].code == "UNREACHABLE"
    assert "round 2" in found.node("n2").health.reasons[0].text
    assert not any("n2" in (link.a, link.b) for link in found.fabric.links)


def test_half_of_the_nodes_gone_is_refused() -> None:
    made = outcome()
    made.lost = {"n2": "gone", "n3": "gone"}

    assert topology(made).verdict.status == "refuse"


def test_a_slow_node_is_degraded_with_the_numbers() -> None:
    found = topology(outcome(6, slow_node="n3"))

    assert found.verdict.status == "warn"
    assert found.verdict.exclude == []
    assert {node.id for node in found.nodes if node.health.verdict == "degraded"} == {"n3"}
    assert "bandwidth is 50% of the median" in found.node("n3").health.reasons[0].text
    assert "not measured again" in found.node("n3").health.reasons[0].evidence


def test_a_slow_device_is_compared_with_its_own_type_only() -> None:
    made = outcome(slow_flops="n1")
    assert topology(made).node("n1").health.reasons[0].code == "SLOW_NODE"

    made.devices["n1"] = report(5e11, kind="older")
    assert topology(made).node("n1").health.verdict == "ok"


def test_the_threshold_is_slack_where_virtual_nodes_share_cores() -> None:
    made = outcome(6, slow_node="n3", rate=0.7 * RATE)

    assert topology(made, slow_ratio=0.8).verdict.status == "warn"
    assert topology(made, slow_ratio=0.5).verdict.status == "go"


def test_devices_that_could_not_be_measured_are_unknown_not_bad() -> None:
    made = outcome()
    del made.devices["n1"]
    made.devices_failed["n1"] = "measure: ended with code 1"

    found = topology(made)

    assert found.node("n1").health.verdict == "unknown"
    assert found.verdict.exclude == []
    assert found.verdict.status == "warn"


def test_nothing_measured_at_all_is_refused() -> None:
    made = outcome()
    made.devices_failed = dict.fromkeys(made.nodes, "no torch")
    made.devices = {}

    assert topology(made).verdict.status == "refuse"


def test_a_broken_link_between_living_nodes_is_a_fault_of_the_link() -> None:
    made = outcome()
    made.pairs = [pair for pair in made.pairs if (pair.a, pair.b) != ("n0", "n1")]
    made.broken[("n0", "n1")] = "n0: the peer stopped sending"

    found = topology(made)

    assert found.verdict.status == "warn"
    assert "link n0 - n1" in found.verdict.faults[0].text
    assert found.fabric.broken == [("n0", "n1")]
    assert found.only(["n0", "n2"]).fabric.broken == []
    made.lost["n1"] = "gone"
    assert topology(made).fabric.broken == []
    assert found.node("n0").health.verdict == "ok"


def test_above_64_nodes_the_pairs_are_a_file_beside_it(tmp_path: Path) -> None:
    made = topology(outcome(66, slow_node="n65"))
    made.write(tmp_path / "t.json")

    found = Topology.read(tmp_path / "t.json")

    assert found.fabric.links == []
    assert found.fabric.classes[0].pairs == 66 * 65 // 2
    assert found.fabric.classes[0].beta_s_per_byte == pytest.approx(1 / RATE, rel=1e-3)
    assert LinkCost(found).between("n0", "n65")[1] == pytest.approx(2 / RATE)
    assert LinkCost(found).between("n0", "n1") == pytest.approx((LATENCY, 1 / RATE))


def test_one_node_has_no_links() -> None:
    found = topology(outcome(1))

    assert found.fabric.classes == []
    assert found.verdict.status == "go"


def test_what_the_ends_say_of_a_transfer_is_in_its_figures() -> None:
    made = outcome(2)
    busy = side().model_copy(update={"sending_cpu": 0.97, "receiving_cpu": 0.1, "iface": "ib0"})
    idle = side().model_copy(update={"sending_cpu": 0.2, "receiving_cpu": 0.3, "iface": "eth1"})
    made.pairs = [PairResult("n0", "n1", False, 1, at_a=busy, at_b=idle)]

    found = topology(made)

    link = found.fabric.links[0]
    assert (link.ab.cpu_contended, link.ba.cpu_contended) == (True, False)
    assert (link.ab.iface, link.ab.transport) == ("ib0", "tcp")
    assert [node.iface for node in found.nodes] == ["ib0", "eth1"]
    assert link.ab.jitter == pytest.approx(2.0)


def test_without_counts_of_processor_time_nothing_is_said_of_it() -> None:
    assert topology(outcome(2)).fabric.links[0].ab.cpu_contended is None


def test_single_messages_shape_the_line_and_load_slows_its_slope() -> None:
    ladder = tuple((size, 1e-5 + size * (1e-10 if size < 65536 else 1e-8)) for size in (1024, 16384, 65536, 2**20))
    quiet = side(1e8, 1e-5).model_copy(update={"ladder": ladder})
    made = outcome(2)
    made.pairs = [PairResult("n0", "n1", True, 1, quiet, quiet), PairResult("n0", "n1", False, 2, side(5e7), side(5e7))]

    figures = topology(made).fabric.links[0].ab

    assert figures.break_bytes == 65536
    assert figures.alpha_s == pytest.approx(1e-5, rel=0.05)
    assert figures.beta_s_per_byte == pytest.approx(2e-8, rel=0.05)


def test_a_nodes_facts_carry_its_clock_against_the_first_node() -> None:
    made = outcome(2)
    for name in made.nodes:
        made.joined[name] = JoinedNode(
            addr="10.0.0.1", port=1, iface="ib0", host=name, facts=HostFacts(kernel="6.1", mtu={"ib0": 2044})
        )
    seen = side().model_copy(update={"clock_offset_s": 0.25, "clock_error_s": 1e-5})
    made.pairs = [PairResult("n0", "n1", False, 1, seen, side())]

    first, second = topology(made).nodes

    assert (first.host_facts.clock_offset_s, first.host_facts.clock_error_s) == (0.0, 0.0)
    assert (second.host_facts.clock_offset_s, second.host_facts.clock_error_s) == (0.25, 1e-5)
    assert second.host_facts.mtu == {"ib0": 2044}


def test_two_clocks_that_differ_are_told_of_both_nodes() -> None:
    made = outcome(2)
    for name in made.nodes:
        made.joined[name] = JoinedNode(addr="10.0.0.1", port=1, iface="ib0", host=name, facts=HostFacts(kernel="6.1"))
    for offset, codes in ((0.4, []), (-3.0, ["CLOCK_SKEW"])):
        seen = side().model_copy(update={"clock_offset_s": offset, "clock_error_s": 1e-5})
        made.pairs = [PairResult("n0", "n1", False, 1, seen, side())]

        found = topology(made)

        assert [fault.code for fault in found.verdict.faults] == codes
        assert [node.health.verdict for node in found.nodes] == ["ok", "ok"]
    assert found.verdict.faults[0].text == "the clocks of n0 and n1 are 3 s apart"


def test_what_hosts_and_devices_say_becomes_faults_of_the_verdict() -> None:
    made = outcome(4)
    for place, name in enumerate(made.nodes):
        facts = HostFacts(
            mtu={"ib0": 4092 if place else 2044}, hostname_resolves_to="127.0.1.1" if place == 1 else None
        )
        made.joined[name] = JoinedNode(addr="10.0.0.1", port=1, iface="ib0", host=name, facts=facts)
    gpu = made.devices["n3"].devices[0]
    link = PcieLink(generation=3, width=8, generation_max=5, width_max=16, under_load=True)
    sick = gpu.model_copy(update={"pcie": link, "ecc_errors": 2})
    made.devices["n3"] = made.devices["n3"].model_copy(update={"devices": [sick]})
    for place, pair in enumerate(made.pairs):
        offset = 3.0 * ((pair.b == "n2") - (pair.a == "n2"))
        seen = side().model_copy(update={"clock_offset_s": offset, "clock_error_s": 1e-5})
        made.pairs[place] = replace(pair, at_a=seen)

    found = topology(made)

    codes = {fault.code for fault in found.verdict.faults}
    assert codes == {"MTU_MISMATCH", "LOOPBACK_HOSTNAME", "CLOCK_SKEW", "PCIE_DOWNSHIFT", "ECC_ERRORS"}
    assert found.verdict.exclude == ["n3"]
    assert all(fault.fix and fault.evidence for fault in found.verdict.faults)


def test_processors_of_one_machine_are_not_compared() -> None:
    made = outcome(4, slow_flops="n1")
    for report_ in made.devices.values():
        report_.device_types["gpu"] = DeviceType(kind="cpu", name="CPU")
    assert topology(made).node("n1").health.verdict == "degraded"

    for name in made.nodes:
        made.joined[name] = JoinedNode(addr="10.0.0.1", port=1, iface="ib0", host=name, facts=HostFacts(boot_id="one"))
    assert topology(made).verdict.status == "go"


def test_a_pair_without_figures_of_the_backend_costs_what_it_does_to_its_class() -> None:
    made = outcome(4)
    over = BackendFigures(alpha_s=3 * LATENCY, beta_s_per_byte=2 / RATE)
    made.backend = {("n0", "n1"): ("gloo", over), ("n1", "n0"): ("gloo", over)}

    found = topology(made)

    assert found.fabric.classes[0].cost() == (3 * LATENCY, 2 / RATE)
    assert LinkCost(found).between("n0", "n1") == (3 * LATENCY, 2 / RATE)
    assert LinkCost(found).between("n2", "n3") == pytest.approx((3 * LATENCY, 2 / RATE))


def test_single_messages_shape_the_line_of_a_large_cluster_too() -> None:
    made = outcome(66)
    ladder = tuple((size, 2e-5 + size / (RATE / 2)) for size in (1024, 16384, 65536, 2**20))
    end = side(RATE / 2, 2e-5).model_copy(update={"ladder": ladder})
    made.add([PairResult("n0", "n1", False, 33, end, end)], ProbeSettings().bulk_bytes)

    assert LinkCost(topology(made)).between("n0", "n1") == pytest.approx((2e-5, 2 / RATE), rel=1e-3)
