"""Messages over the training backend: who meets, and what lines come out."""

import pytest

from hpctrain.probe.protocol.messages import (
    MAX_ROUNDS,
    BackendReport,
    backend_lines,
    backend_rounds,
    choose_backend,
    network_used,
)


def test_all_pairs_of_a_small_group_meet_and_a_large_one_stops() -> None:
    assert len({pair for met in backend_rounds(4, 0) for pair in met}) == 6
    assert len(backend_rounds(200, 0)) == MAX_ROUNDS
    assert backend_rounds(7, 3) == backend_rounds(7, 3)


@pytest.mark.parametrize(
    ("kinds", "loopback", "backend"),
    [
        ([{"cuda"}, {"cuda"}], False, "nccl"),
        ([{"cuda"}, {"cpu"}], False, "gloo"),
        ([{"cuda"}, {"cuda"}], True, "gloo"),
        ([], False, "gloo"),
    ],
)
def test_nccl_only_where_every_node_has_gpus_of_its_own(kinds, loopback: bool, backend: str) -> None:
    assert choose_backend(kinds, loopback) == backend


def report(times, **more) -> BackendReport:
    return BackendReport(backend="nccl", times=times, **more)


def test_each_direction_is_a_line_and_what_tells_none_is_absent() -> None:
    line = tuple((size, 1e-5 + size * 1e-9) for size in (8, 1024, 2**20))
    flat = ((8, 1e-5), (1024, 1e-5))
    reports = {"n0": report({1: line, 2: line[:1]}, network="IB"), "n2": report({1: flat, 9: line})}

    found = backend_lines(["n0", "n1", "n2"], reports)

    assert list(found) == [("n0", "n1")]
    backend, figures = found["n0", "n1"]
    assert (backend, figures.network, figures.break_bytes) == ("nccl", "IB", None)
    assert figures.alpha_s == pytest.approx(1e-5)
    assert figures.beta_s_per_byte == pytest.approx(1e-9)


def test_what_nccl_says_that_it_uses() -> None:
    log = (
        "n1:811:811 [0] NCCL INFO Bootstrap : Using ib0:10.1.0.1<0>\n"
        "n1:811:840 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.1.0.1<0>\n"
        "n1:811:840 [0] NCCL INFO Using network IB\n"
    )

    assert network_used(log) == "IB"
    assert network_used(log.replace("Using network IB", "Using network Socket")) == "Socket"
    assert network_used("") is None
