"""Training on a machine of a cluster, outside of any job."""

from __future__ import annotations

import os
import platform
from types import SimpleNamespace

import psutil
import pytest
from fake_slurm import FakeSlurm

from hpctrain.base.errors import InputError
from hpctrain.launch.preflight.site import check_not_queued_here, login_node_words
from hpctrain.slurm.commands import Slurm


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A login node of 64 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(psutil, "process_iter", lambda names: [SimpleNamespace(info={"name": "sshd"})])
    return FakeSlurm()


def test_training_on_a_login_node_is_warned_of(fake: FakeSlurm) -> None:
    (line,) = login_node_words(4, Slurm(fake), {})
    assert "looks like a login node, and the run keeps 64 of its cores busy" in line
    assert "hpctrain submit RUN.YAML --set cluster.kind=slurm" in line
    assert "keeps 8 of its cores" in login_node_words(4, Slurm(fake), {"OMP_NUM_THREADS": "2"})[0]


@pytest.mark.parametrize(
    ("environ", "installed", "process"),
    [
        ({"SLURM_JOB_ID": "7"}, True, "sshd"),
        ({"OMP_NUM_THREADS": "1"}, True, "sshd"),
        ({}, False, "sshd"),
        ({}, True, "slurmd"),
    ],
    ids=["in a job", "few cores", "no cluster", "a node of the cluster"],
)
def test_elsewhere_it_is_not(
    fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], installed: bool, process: str
) -> None:
    fake.installed = installed
    monkeypatch.setattr(psutil, "process_iter", lambda names: [SimpleNamespace(info={"name": process})])
    assert login_node_words(4, Slurm(fake), environ) == []


def test_a_host_that_slurm_lists_is_no_login_node(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may not see the processes of others, slurmd among them."""
    monkeypatch.setattr(platform, "node", lambda: f"{next(iter(fake.node_states))}.cluster.example.org")
    assert login_node_words(4, Slurm(fake), {}) == []
    fake.away = True
    assert "looks like a login node" in login_node_words(4, Slurm(fake), {})[0]


def test_a_run_of_kind_local_is_refused_where_slurm_is(fake: FakeSlurm) -> None:
    with pytest.raises(InputError, match=r"found local on a machine with Slurm: .* on this machine, add --local"):
        check_not_queued_here(Slurm(fake), "add --local")
    fake.installed = False
    check_not_queued_here(Slurm(fake), "add --local")
