"""What a terminal would obey is shown, and not sent."""

from __future__ import annotations

import io
import sys

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live

from hpctrain.base.output_streams import EscapedStream, control, escaped_output, first_control_character, printable
from hpctrain.cli.views.console import Console

CODES = (*range(9), *range(11, 32), *range(0x7F, 0xA0), 0x2028, 0x202E, 0x2066, 0xDC80)
HARMFUL = [chr(code) for code in CODES]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("step 3\tloss 2.1\n", "step 3\tloss 2.1\n"),
        ("Grüße, 模型 µs", "Grüße, 模型 µs"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b[38:5:1mred", "red"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
        ("\x9b2J", r"\x9b2J"),
        ("one\r\ntwo\rthree", r"one" + "\n" + r"two\rthree"),
        ("run\u202egnp", r"run\u202egnp"),
        ("name\udcff", r"name\udcff"),
        # What is left out must not make a new sequence of what stood around it.
        ("\x1b\x1b[0m[2J", r"\x1b[2J"),
    ],
)
def test_control_characters_are_written_as_python_has_them(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.one_of(st.sampled_from(HARMFUL), st.sampled_from("[]0;mHJ\n"), st.characters(exclude_categories=()))))
def test_no_text_leads_to_a_control_character(text: str) -> None:
    shown = printable(text)
    assert not set(shown) & set(HARMFUL)
    assert printable(shown) == shown
    shown.encode()


@given(st.text(st.characters(categories=("L", "N", "P", "S", "Zs"))))
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == text
    assert first_control_character(text) is None


@pytest.mark.parametrize("character", ["\n", "\r", "\t", "\x1b", "\x00", "\x85", "\u2028", "\udcff"])
def test_a_text_of_one_line_has_none(character: str) -> None:
    assert first_control_character(f"/runs/a{character}b") == ascii(character)[1:-1]


def test_whoever_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with escaped_output():
        print("print \x1b[2J")
        click.echo("click \x07")
        click.echo("click \x07", err=True)
        sys.stderr.writelines(["lines \x07", "\n"])
        control(sys.stdout, "\r\x1b[2K")
    assert out.getvalue() == "print \\x1b[2J\nclick \\x07\n\r\x1b[2K"
    assert err.getvalue() == "click \\x07\nlines \\x07\n"
    assert sys.stdout is out


def test_a_live_view_draws_in_place_behind_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich puts a stream of its own before the filter while a view is live."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with escaped_output():
        console = Console(force_terminal=True, width=60, highlight=False)
        with Live("first \x1b[2J", console=console, auto_refresh=False) as live:
            live.update("second", refresh=True)
            print("a line beside it \x07")
    assert "\\x1b[2K" not in out.getvalue()
    assert "\x1b[2K" in out.getvalue()
    assert "first \\x1b[2J" in out.getvalue()
    assert "a line beside it" in out.getvalue()
    assert "\x07" not in out.getvalue()


def test_a_stream_of_ascii_is_not_passed_by() -> None:
    """click looks for the bytes behind a stream of ASCII, to write UTF-8 there."""
    behind = io.BytesIO()
    stream = EscapedStream(io.TextIOWrapper(behind, "ascii", errors="replace", write_through=True))
    click.echo("\x07 µ", file=stream)
    assert behind.getvalue() == b"\\x07 ?\n"
    assert stream.encoding == "ascii"
