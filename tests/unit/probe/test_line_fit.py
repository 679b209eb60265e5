"""The line through message times, and the size at which small and large messages part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.probe.measure.figures import fit_alpha_beta, fit_lines, one_way_s

POSITIVE = st.floats(1e-9, 1e3)
LADDER = [1024 * 4**step for step in range(6)]


@given(
    alpha=st.floats(1e-6, 1e-2),
    beta=st.floats(1e-11, 1e-6),
    sizes=st.lists(st.integers(1, 2**28), min_size=2, max_size=6, unique=True),
)
def test_the_fit_gives_back_an_exact_line(alpha: float, beta: float, sizes: list[int]) -> None:
    fitted_alpha, fitted_beta = fit_alpha_beta([(size, alpha + beta * size) for size in sizes])

    for size in sizes:
        assert fitted_alpha + fitted_beta * size == pytest.approx(alpha + beta * size, rel=1e-4)


@given(st.lists(st.tuples(st.integers(1, 10**9), POSITIVE), min_size=2, max_size=8, unique_by=lambda p: p[0]))
def test_the_fit_is_never_negative(points: list[tuple[int, float]]) -> None:
    alpha, beta = fit_alpha_beta(points)

    assert alpha >= 0
    assert beta >= 0


@pytest.mark.parametrize("points", [[(8, 1e-5)], [(8, 1e-5), (8, 2e-5)], [(8, 0.0), (16, 1.0)]])
def test_a_line_needs_two_sizes_and_positive_times(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit_alpha_beta(points)


@given(alpha=st.floats(1e-6, 1e-3), beta=st.floats(1e-11, 1e-7), noise=st.lists(st.floats(0.95, 1.05), min_size=6))
def test_one_line_with_a_little_noise_has_no_break(alpha: float, beta: float, noise: list[float]) -> None:
    (line,) = fit_lines([[(size, (alpha + beta * size) * by) for size, by in zip(LADDER, noise, strict=False)]])

    assert line.break_bytes is None


def test_a_message_takes_its_round_trip_less_the_answer_but_at_least_half_of_it() -> None:
    assert one_way_s(4e-5, 1e-5) == pytest.approx(3e-5)
    assert one_way_s(4e-5, 3.9e-5) == 2e-5


def test_a_burst_that_passes_at_once_does_not_make_the_start_up_negative() -> None:
    # 64 kB pass for nothing, then the rate holds: the best line without a negative start-up goes through the origin.
    alpha, beta = fit_alpha_beta([(131072, 67072e-8), (2**20, 984576e-8)])

    assert alpha == 0
    assert 67072e-8 / 131072 < beta < 984576e-8 / 2**20


def test_eager_and_bulk_messages_are_two_lines_and_the_break_is_told() -> None:
    def seconds(size: float) -> float:
        return 1e-5 + size * 1e-9 if size <= 16384 else 3e-4 + size * 1e-8

    (line,) = fit_lines([[(0.0, 1e-5), *((size, seconds(size)) for size in LADDER), (1e8, seconds(1e8))]])

    assert line.break_bytes == 65536
    assert line.alpha_s == pytest.approx(1e-5, rel=0.01)
    assert line.beta_s_per_byte == pytest.approx(1e-8, rel=0.01)


def test_disturbed_small_messages_do_not_hide_what_a_byte_takes() -> None:
    # Messages over Gloo on a busy machine behind a shaped link: two of the small ones were held up.
    small = [(8, 4e-5), (1024, 9e-4), (16384, 6e-5), (131072, 1.4e-3)]
    large = [(size, 1e-5 + size / 1.2e8) for size in (2**19, 2**21, 2**23)]

    (line,) = fit_lines([[*small, *large]])

    assert line.beta_s_per_byte == pytest.approx(1 / 1.2e8, rel=0.05)
    assert line.alpha_s < 1e-3


@given(
    st.lists(st.tuples(st.integers(0, 10**8), POSITIVE), min_size=2, max_size=9).filter(
        lambda p: len({s for s, _ in p}) > 1
    )
)
def test_whatever_the_times_the_figures_are_not_negative_and_the_break_is_a_size(
    points: list[tuple[int, float]],
) -> None:
    (line,) = fit_lines([points])

    assert line.alpha_s >= 0
    assert line.beta_s_per_byte >= 0
    assert line.break_bytes is None or line.break_bytes in {size for size, _ in points}
