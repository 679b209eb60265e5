"""Time limits and moments in every form that Slurm takes or prints."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.slurm.values import format_time_limit, parse_time_limit, read_duration, read_moment


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("1:30:00", 5400),
        ("2-0", 172800),
        ("1-12:30", 131400),
        ("1-12:30:15", 131415),
        ("UNLIMITED", None),
        ("infinite", None),
        ("0", None),
        (" 30 ", 1800),
    ],
)
def test_the_forms_of_sbatch(text, seconds):
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize("text", ["", "abc", "1:2:3:4", "1-", "-5", "1.5", "1h", "1-2:3:4:5", "٣"])
def test_other_texts_are_refused_with_what_is_allowed(text):
    with pytest.raises(ValueError, match=r"allowed: minutes, .*days-hours, .*UNLIMITED"):
        parse_time_limit(text)


@given(st.none() | st.integers(min_value=1, max_value=400 * 86400))
def test_what_is_formatted_is_read_back(seconds):
    assert parse_time_limit(format_time_limit(seconds)) == seconds


@given(st.integers(0, 30), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_all_forms_of_one_time_agree(days, hours, minutes, seconds):
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert parse_time_limit(f"{days}-{hours}:{minutes}:{seconds}") == whole
    assert parse_time_limit(f"{days * 24 + hours}:{minutes}:{seconds}") == whole
    assert parse_time_limit(f"{(days * 24 + hours) * 60 + minutes}:{seconds}") == whole


def test_the_form_of_slurm_itself():
    assert format_time_limit(131415) == "1-12:30:15"
    assert format_time_limit(5400) == "01:30:00"


@pytest.mark.parametrize("text", ["NONE", "NOT_SET", "INVALID", "Partition_Limit", "n/a", "(null)"])
def test_no_known_limit_is_none(text):
    assert read_duration(text) is None


def test_moments(monkeypatch):
    monkeypatch.setenv("TZ", "Etc/GMT+5")
    time.tzset()
    try:
        assert read_moment("1795229091") == 1795229091.0
        assert read_moment("1970-01-01T00:00:00") == 5 * 3600  # without a zone it is local time
        assert [read_moment(text) for text in ("Unknown", "N/A", "None", "")] == [None] * 4
    finally:
        monkeypatch.undo()
        time.tzset()
