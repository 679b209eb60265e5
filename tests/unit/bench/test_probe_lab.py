"""The probe beside iperf3: how repeats become a row, and what iperf3 prints."""

import json

import pytest

from hpctrain.bench.probe.lab_probe import compare_rates, received_bytes_per_s
from hpctrain.records.topology.link import LinkFigures


def test_a_row_compares_medians_and_tells_the_spread() -> None:
    ours = [LinkFigures(isolated_bytes_per_s=rate, cpu_contended=rate > 100) for rate in (95.0, 90.0, 105.0)]

    row = compare_rates("1gbit", ours, [100.0, 102.0, 98.0])

    assert (row.case, row.ours_bytes_per_s, row.iperf3_bytes_per_s) == ("1gbit", 95.0, 100.0)
    assert row.error_pct == pytest.approx(-5.0)
    assert row.ours_spread_pct == pytest.approx(100 * 15 / 95)
    assert row.iperf3_spread_pct == pytest.approx(4.0)
    assert row.cpu_contended == 1


def test_nothing_measured_is_no_row() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        compare_rates("1gbit", [LinkFigures()], [1.0])


def test_the_receivers_rate_is_read() -> None:
    text = json.dumps({"end": {"sum_sent": {"bits_per_second": 1e9}, "sum_received": {"bits_per_second": 8e8}}})

    assert received_bytes_per_s(text) == 1e8


@pytest.mark.parametrize("text", ["", "[]", '{"error": "unable to connect"}', '{"end": {}}'])
def test_an_answer_without_it_is_no_rate(text: str) -> None:
    assert received_bytes_per_s(text) is None
