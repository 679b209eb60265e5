"""The environment and the home folder of an account: what is seen, and what it means for a run."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import CommandError
from hpctrain.base.process import CommandResult
from hpctrain.doctor.account import inspect_environment, inspect_home, parse_quota
from hpctrain.doctor.account_findings import environment_findings, home_finding
from hpctrain.doctor.facts import EnvironmentFacts, HomeFacts, Quota, StoredPart, UnfitPackage
from hpctrain.runs.file_system import device_of

QUOTA = """Disk quotas for user anna (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
nas:/export/home 9500000  10000000 12000000       0   81000* 80000  100000 1795000000
/dev/sdb1   1234       0       0       0      12       0       0       0
nas:/export/scratch 500   0 4000       0      7        0       0       0
"""
VENV = StoredPart("the environment", Path("/home/anna/venv"), "nfs4")
ENVIRONMENT = EnvironmentFacts("venv", "3.11.7", (VENV,), ())
HOME = HomeFacts(Path("/home/anna"), "nfs4", 2**40, 10**7, None, ("HF_HOME",))


def there(name):
    return f"/usr/bin/{name}"


class NoQuota:
    """A runner whose `quota` does not answer."""

    def run(self, argv, timeout_s=None, env=None):
        raise CommandError(f"{argv[0]}: no answer after 10 s")


class WithQuota(NoQuota):
    """A runner whose `quota` prints a limit for the device of a folder; its exit code says that one is exceeded."""

    def __init__(self, folder: Path) -> None:
        self.text = QUOTA.replace("nas:/export/home", device_of(folder))

    def run(self, argv, timeout_s=None, env=None):
        assert argv == ["quota", "-w", "-p"]
        return CommandResult(tuple(argv), 1, self.text, "")


@dataclass
class Python:
    prefix: str
    base_prefix: str


def test_a_quota_is_read_for_the_file_system_that_was_asked_for():
    assert parse_quota(QUOTA, "nas:/export/home") == Quota(9_500_000 * 1024, 10_000_000 * 1024, 81_000, 80_000)
    assert parse_quota(QUOTA, "nas:/export/scratch") == Quota(500 * 1024, 4000 * 1024, 7, None)
    assert parse_quota(QUOTA, "/dev/sdb1") is None  # counted, and not limited
    assert parse_quota(QUOTA, "nas:/export") is None
    assert parse_quota("Disk quotas for user root (uid 0): none\n", "/dev/sda1") is None


@given(st.text(), st.lists(st.one_of(st.integers().map(str), st.text(max_size=3)), max_size=12))
def test_no_text_of_quota_ends_the_doctor(text, fields):
    parse_quota(text, "dev")
    parse_quota(" ".join(["dev", *fields]), "dev")


def test_the_home_folder_of_this_machine(tmp_path):
    environ = {"HOME": str(tmp_path), "HF_HOME": "/scratch/hf", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    home = inspect_home(NoQuota(), environ, there)
    assert (home.path, home.quota) == (tmp_path, None)
    assert home.free_bytes > 0
    assert home.caches == ("PIP_CACHE_DIR", "TORCH_HOME", "TRITON_CACHE_DIR", "APPTAINER_CACHEDIR")
    assert inspect_home(WithQuota(tmp_path), environ, there).quota.limit_files == 80_000
    nowhere = inspect_home(NoQuota(), {"HOME": str(tmp_path / "none")}, lambda name: None)
    assert (nowhere.free_bytes, nowhere.free_files) == (None, None)


@pytest.mark.parametrize(
    ("made", "base", "environ", "kind"),
    [
        ("venv", "/usr", {}, "venv"),
        ("env/conda-meta", "env", {}, "conda"),
        ("p/.pixi/envs/default/conda-meta", "p/.pixi/envs/default", {}, "pixi"),
        ("usr", "usr", {}, "system"),
        ("venv", "/usr", {"APPTAINER_CONTAINER": "train.sif"}, "image"),
    ],
)
def test_the_kind_of_environment(monkeypatch, tmp_path, made, base, environ, kind):
    monkeypatch.setattr("hpctrain.__file__", str(tmp_path / "source" / "hpctrain" / "__init__.py"))
    (tmp_path / made).mkdir(parents=True)
    prefix = tmp_path / made.removesuffix("/conda-meta")
    found = inspect_environment(environ, Python(str(prefix), str(tmp_path / base)))
    assert found.kind == kind
    assert found.parts[0].path == prefix
    assert found.parts[-1].name == "hpctrain"


def test_the_environment_of_this_test(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["click>=1"])
    found = inspect_environment({})
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.unfit == ()


def test_versions_that_hpctrain_does_not_accept(monkeypatch):
    needs = ["submitit<1.6,>=1.5.2", "click>=8.1", 'wandb<1,>=0.19; extra == "track"', 'spacy>=3; extra == "data"']
    versions = {"submitit": "1.6.0", "click": "8.2", "wandb": "1.0.1"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needs)
    monkeypatch.setattr(importlib.metadata, "version", version)
    unfit = inspect_environment({}).unfit
    assert unfit == (
        UnfitPackage("submitit", "1.6.0", "<1.6,>=1.5.2", True),
        UnfitPackage("wandb", "1.0.1", "<1,>=0.19", False),
    )
    first, second = environment_findings(replace(ENVIRONMENT, unfit=unfit), elsewhere=False)[1:]
    assert (first.name, first.level, first.value) == ("submitit", "problem", "1.6.0")
    assert first.todo == "pip install 'submitit<1.6,>=1.5.2'"
    assert (second.name, second.level) == ("wandb", "note")


def test_an_environment_that_is_as_it_should_be():
    environment, seen, packages = environment_findings(ENVIRONMENT, elsewhere=True)
    assert environment.level == seen.level == packages.level == "ok"
    assert environment.value == "a virtual environment: /home/anna/venv, Python 3.11.7"
    assert [finding.name for finding in environment_findings(ENVIRONMENT, elsewhere=False)] == [
        "environment",
        "packages",
    ]


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"python": "3.14.1"}, "note", "tried with Python up to 3.13"),
        ({"kind": "system"}, "note", "an update of it breaks hpctrain"),
    ],
)
def test_an_environment_to_know_about(changes, level, words):
    finding = environment_findings(replace(ENVIRONMENT, **changes), elsewhere=True)[0]
    assert finding.level == level
    assert words in finding.words


@pytest.mark.parametrize(("kind", "level"), [("tmpfs", "problem"), ("ext4", "note"), ("lustre", "ok"), ("", "note")])
def test_whether_nodes_see_the_environment(kind, level):
    finding = environment_findings(replace(ENVIRONMENT, parts=(replace(VENV, kind=kind),)), elsewhere=True)[1]
    assert finding.level == level
    assert ("a folder that all nodes share" in finding.todo) == (level != "ok")


def test_inside_an_image_nothing_is_said_of_its_file_system():
    assert len(environment_findings(replace(ENVIRONMENT, kind="image"), elsewhere=True)) == 2


@pytest.mark.parametrize(
    ("changes", "level", "value"),
    [
        ({}, "ok", "/home/anna: nfs4, 1.0 TiB free"),
        ({"free_bytes": 2**30}, "note", "/home/anna: nfs4, 1.0 GiB free"),
        ({"free_files": 500}, "note", "/home/anna: nfs4, 1.0 TiB free"),
        ({"free_bytes": None, "free_files": None}, "ok", "/home/anna: nfs4"),
        (
            {"quota": Quota(2**30, 10 * 2**30, 900, None)}, "note",
            "/home/anna: nfs4, 1.0 GiB of 10.0 GiB and 900 files used (quota)",
        ),
        (
            {"quota": Quota(2**30, 2**36, 99_000, 100_000)}, "note",
            "/home/anna: nfs4, 1.0 GiB of 64.0 GiB and 99,000 of 100,000 files used (quota)",
        ),
        (
            {"quota": Quota(2**30, None, 99_000, 10**6)}, "ok",
            "/home/anna: nfs4, 1.0 GiB and 99,000 of 1,000,000 files used (quota)",
        ),
    ],
)  # fmt: skip
def test_the_room_at_home(changes, level, value):
    finding = home_finding(replace(HOME, **changes))
    assert (finding.level, finding.value) == (level, value)
    assert ("caches in it: HF_HOME" in finding.words) == (level == "note")
    assert ("hpctrain docs tutorial/1-storage" in finding.todo) == (level == "note")


def test_a_home_folder_beyond_its_quota_has_no_room():
    finding = home_finding(replace(HOME, quota=Quota(2**34, 2**33, 5, None)))
    assert finding.level == "note"
