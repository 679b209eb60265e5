"""A simulated probe pays for its single messages and for those over the training backend, and reports both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.probe.analyse.assemble import assemble
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.protocol.messages import SIZES, times_of, warm_up_of
from tools.probe_simulation.fabric import FabricSpec, SimulatedFabric
from tools.probe_simulation.tables import runtime_row, simulated_probe

QUIET = FabricSpec(16, per_leaf=16, bytes_per_s=1e9, latency_s=1e-5, noise=0.0)


def test_single_messages_take_their_time() -> None:
    settings = ProbeSettings(device="none")

    whole = simulated_probe(SimulatedFabric(QUIET), settings)
    bare = simulated_probe(SimulatedFabric(QUIET), replace(settings, ladder_bytes=()))

    each_end = settings.ladder_times * sum(2 * QUIET.latency_s + size / 1e9 for size in settings.ladder_bytes)
    assert (whole.wall_s - bare.wall_s) / whole.rounds_done == pytest.approx(2 * each_end, rel=1e-3)


def test_a_slow_link_stops_its_single_messages_as_a_real_one_does() -> None:
    settings = ProbeSettings(device="none")
    slow = simulated_probe(SimulatedFabric(replace(QUIET, bytes_per_s=1e6)), settings)

    # 0.17 s are over after the messages of 16 KiB: of the next size there are three, which pass the limit of 0.2 s.
    assert [size for size, _ in slow.pairs[0].at_a.ladder] == [1024, 4096, 16384, 65536]


def test_messages_over_the_backend_become_figures_of_the_links() -> None:
    settings = ProbeSettings(device="cpu")
    outcome = simulated_probe(SimulatedFabric(QUIET), settings)

    link = assemble(outcome, settings, wall=0.0).fabric.links[0]

    assert link.ab.backend["gloo"].beta_s_per_byte == pytest.approx(1e-9, rel=0.01)
    assert link.ab.backend["gloo"].alpha_s > 3 * link.ab.alpha_s


def test_a_row_has_the_time_of_the_backend() -> None:
    row = runtime_row(16, "full", 8.0)

    least = 15 * 2 * sum((times_of(size) + warm_up_of(size)) * size / 1e9 for size in SIZES)
    assert least < row.backend_s < 2 * least
