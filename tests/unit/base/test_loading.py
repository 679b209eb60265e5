"""While a module is loaded nothing is collected; afterwards all is as it was, whatever came of it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from hpctrain.base.loading import load


def test_nothing_is_collected_while_a_module_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asks_the_collector.py").write_text("import gc\nCOLLECTING = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load("asks_the_collector").COLLECTING is False
    assert gc.isenabled()


def test_a_module_that_cannot_be_loaded_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError):
        load("no_such_module_of_ours")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        load("colorsys")
        assert not gc.isenabled()
    finally:
        gc.enable()
