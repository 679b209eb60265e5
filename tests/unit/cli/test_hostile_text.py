"""What stands in logs, events, folder names and errors is shown by every command, and obeyed by no terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text
from run_folders import event, submitted_run

from hpctrain.base.output_streams import EscapedStream, format_timestamp
from hpctrain.cli import main
from hpctrain.cli.views.console import Console
from hpctrain.report.live_run import LiveRun
from hpctrain.report.status import read_status
from hpctrain.report.terminal import TerminalLine, show
from hpctrain.report.watch.run_view import WatchedFigures, run_view
from hpctrain.report.watch.text_fit import Screen

ATTACK = "\x1b]0;owned\x07\x1b[2J\r\x9b1A"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\r\x9b1A"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a command line shows on a terminal, stdout and stderr."""

    def run(*words: str) -> str:
        out = Terminal()
        for name, value in (("argv", ["hpctrain", *words]), ("stdout", out), ("stderr", out)):
            monkeypatch.setattr(sys, name, value)
        with pytest.raises(SystemExit):
            main.main()
        return out.getvalue()

    return run


@pytest.fixture
def folder(fake, runs: Path) -> Path:
    """A run that failed, with everything in it that somebody could write."""
    folder = submitted_run(runs, "1", event("failed", reason=f"no node left {ATTACK}"))
    (folder / "logs" / "0").mkdir()
    (folder / "logs" / "0" / "gpu1.0.log").write_text(f"{format_timestamp(1.0)}loss {ATTACK}\n")
    return folder


@pytest.mark.parametrize(
    "words", [("logs", "gpt"), ("status", "gpt"), ("status", f"a{ATTACK}"), ("cancel", f"a{ATTACK}"), (f"a{ATTACK}",)]
)
def test_no_command_sends_it(folder: Path, typed: Callable[..., str], words: tuple[str, ...]) -> None:
    said = typed(*words)
    assert SHOWN in said
    assert not set(said) & set("\x1b\x07\r\x9b")


def test_a_list_shows_folder_names(folder: Path, typed: Callable[..., str]) -> None:
    folder.rename(folder.with_name(f"x{ATTACK.replace('/', '')}"))
    said = typed("list")
    assert f"/x{SHOWN}" in said
    assert not set(said) & set("\x1b\x07\r\x9b")


def test_a_view_that_is_drawn_styles_its_own_text_only(folder: Path) -> None:
    out = Terminal()
    console = Console(file=out, force_terminal=True, width=200, color_system="truecolor")
    status = read_status(folder, 0.0)
    live = LiveRun(folder)
    live.events = [event("failed", reason=ATTACK)]
    figures = WatchedFigures(live, status, None, f"7{ATTACK}", 0.0)
    console.print(Group(*run_view(figures, Screen(200, 24))))
    table = Table()
    table.add_column("name")
    table.add_row(Text(ATTACK))
    table.add_row(ATTACK)
    console.print(table)
    said = out.getvalue()
    assert said.count(r"\x1b]0;") == 5
    assert "\x1b[1m" in said  # its own bold
    assert not any(harm in said for harm in ("\x1b]", "\x1b[2J", "\x07", "\r", "\x9b"))


def test_a_line_of_progress_is_still_written_over() -> None:
    out = Terminal()
    show([TerminalLine("step 1", True), TerminalLine(f"step {ATTACK}", False)], EscapedStream(out), in_place=True)
    assert out.getvalue() == f"step 1\r\x1b[2Kstep {SHOWN}\n"


def test_every_view_is_drawn_by_that_console(repository: Path) -> None:
    importing = [
        path.name
        for path in (repository / "hpctrain").rglob("*.py")
        if "rich.console import Console\n" in path.read_text() or "rich.get_console" in path.read_text()
    ]
    assert importing == []
