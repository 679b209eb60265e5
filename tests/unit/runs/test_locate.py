"""From a name to a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from two_users import ME, OTHER, as_user, give, shared_space

from hpctrain.base.errors import InputError, UntrustedError
from hpctrain.runs.locate import find_run, job_id, record_job, run_name


def make_run(place: Path, folder: str) -> Path:
    path = place / folder
    path.mkdir(parents=True)
    (path / "run.yaml").write_text("steps: 1\n")
    return path


@pytest.fixture
def here(tmp_path: Path) -> Path:
    path = tmp_path / "here"
    path.mkdir()
    return path


def test_a_path_is_itself(here):
    run = make_run(here, "anywhere/mine")
    assert find_run("anywhere/mine", {}, here) == run
    assert find_run(str(run), {}, Path("/")) == run


def test_a_name_finds_its_newest_folder(here):
    make_run(here / "runs", "gpt-20260101T000000Z-ffff")
    newest = make_run(here / "runs", "gpt-20260301T000000Z-0000")
    make_run(here / "runs", "gpt-20260201T000000Z-aaaa")
    make_run(here / "runs", "gpt-2-20270101T000000Z-aaaa")
    assert find_run("gpt", {}, here) == newest


def test_a_folder_that_is_no_run_does_not_hide_the_run_of_its_name(here):
    run = make_run(here / "runs", "gpt-20260101T000000Z-ffff")
    (here / "gpt").mkdir()
    assert find_run("gpt", {}, here) == run
    with pytest.raises(InputError, match=r"\./gpt: not a run folder, it has no run\.yaml"):
        find_run("./gpt", {}, here)


def test_every_job_of_a_run_leads_to_it(here):
    run = make_run(here / "runs", "gpt-20260101T000000Z-ffff")
    assert job_id(run) is None
    record_job(run, "7")
    record_job(run, "9")
    assert job_id(run) == "9"
    assert find_run("7", {}, here) == find_run("9", {}, here) == run


def test_a_whole_folder_name_finds_that_folder(here):
    old = make_run(here / "runs", "gpt-20260101T000000Z-ffff")
    make_run(here / "runs", "gpt-20260301T000000Z-0000")
    assert find_run(old.name, {}, here) == old


def test_the_second_place_is_asked_only_when_the_first_has_none(here, tmp_path):
    far = tmp_path / "far"
    elsewhere = make_run(far, "gpt-20270101T000000Z-0000")
    assert find_run("gpt", {"HPCTRAIN_RUNS": str(far)}, here) == elsewhere
    near = make_run(here / "runs", "gpt-20260101T000000Z-0000")
    assert find_run("gpt", {"HPCTRAIN_RUNS": str(far)}, here) == near


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpd", "nearest: gpt"),
        ("zzz", "there are: bert, gpt"),
        ("some/where", "no such folder"),
        ("plain", "it has no run.yaml"),
        ("notes.txt", "found a file"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(here, name, expected):
    make_run(here / "runs", "gpt-20260101T000000Z-0000")
    make_run(here / "runs", "bert-20260101T000000Z-0000")
    (here / "plain").mkdir()
    (here / "notes.txt").touch()
    with pytest.raises(InputError, match=expected) as caught:
        find_run(name, {}, here)
    assert str(caught.value).startswith(f"{name}: ")
    assert "\n" not in str(caught.value)


def test_without_any_run_the_places_are_named(here):
    with pytest.raises(InputError, match=r"there is none in .*/here/runs \(set HPCTRAIN_RUNS"):
        find_run("gpt", {}, here)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("gpt-20260102T030405Z-00ff", "gpt"),
        ("gpt-2-20260102-030405-00ff", "gpt-2"),
        ("by-hand", "by-hand"),
    ],
)
def test_the_name_within_a_folders_name(folder, name):
    assert run_name(folder) == name


@pytest.mark.requires("root")
def test_a_folder_of_somebody_else_is_not_said_to_be_without_a_run() -> None:
    with shared_space() as space:
        (space / "theirs").mkdir(mode=0o700)
        give(space / "theirs", OTHER)
        with pytest.raises(UntrustedError, match=rf"theirs: belongs to another user \(uid {OTHER}\)"):
            as_user(ME, lambda: find_run("theirs", {}, space))
