"""A step as letters and as a chart."""

from __future__ import annotations

from hpctrain.report.html.charts.spans import gantt_chart
from hpctrain.report.timeline import KINDS, STYLES, WAITS, Bar, letters, terminal_lines

BARS = [
    Bar(0, "F", "0F0", 0.0, 2.0),
    Bar(0, "B", "0B0", 5.0, 9.0),
    Bar(1, "F", "1F0", 2.0, 3.0),
    Bar(1, "B", "1B0", 3.0, 5.0),
    Bar(1, "U", "norm and optimizer", 9.0, 10.0),
]


def test_each_column_is_what_takes_most_of_it():
    assert letters(BARS, 2, 10.0, 10) == ["FF···BBBB·", "··FBB····U"]
    assert letters(BARS, 2, 10.0, 5)[0] == "F·BBB"
    assert letters([], 1, 0.0, 4) == ["····"]


def test_lines_fill_the_width_and_say_what_letters_mean():
    *lines, key = terminal_lines(BARS, 2, 10.0, 40)
    assert [line.cell_len for line in lines] == [40, 40]
    assert key.plain == "F forward, B backward, U norm and optimizer, · waits"
    assert set(STYLES) == {*KINDS, WAITS}


def test_the_chart_has_a_bar_for_each_action_with_its_start():
    chart = gantt_chart("step", "A step", BARS, 2)
    assert len(chart.bars) == len(BARS)
    backward = [bar for bar in chart.bars if chart.kinds[bar[1]] == "backward"]
    assert backward == [(0, 1, 5.0, 9.0, "0B0"), (1, 1, 3.0, 5.0, "1B0")]
    assert chart.words == ("A step: 2 rows; all together: forward 3 s, backward 6 s, norm and optimizer 1 s")
