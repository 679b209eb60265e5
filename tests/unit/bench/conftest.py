"""Ranks of a bench as forks of one process that has loaded torch."""

from __future__ import annotations

import functools

import pytest
import torch.multiprocessing as mp


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_ranks` forks, so that its ranks need not load torch, which takes longer than what they do in a test."""
    mp.get_context("forkserver").set_forkserver_preload(["hpctrain.worker.train"])
    monkeypatch.setattr(mp, "spawn", functools.partial(mp.start_processes, start_method="forkserver"))
