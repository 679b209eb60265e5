"""site.yaml: what is read, which profile counts, and what it fills in."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from fake_slurm import FakeSlurm
from hypothesis import given
from hypothesis import strategies as st
from run_folders import RUN

from hpctrain.base.errors import FileError, InputError
from hpctrain.launch.preflight.site import site_defaults
from hpctrain.records.format.yaml_file import missing_values, with_defaults
from hpctrain.records.run.cluster import read_site, site_file
from hpctrain.records.run.run import read_run
from hpctrain.slurm.commands import Slurm

SITE = """
profiles:
  elsewhere: {match: [other, "login*.other.org"], cluster: {account: chem}}
  here:
    match: fake
    cluster:
      account: physics
      setup: [module load cuda]
      mail: {user: anna@example.org}
  anywhere: {cluster: {qos: normal}}
"""


def written(folder: Path, text: str = SITE) -> dict[str, str]:
    """An environment in which this is the person's site.yaml."""
    (folder / "hpctrain").mkdir()
    (folder / "hpctrain" / "site.yaml").write_text(text)
    return {"XDG_CONFIG_HOME": str(folder)}


def test_the_profile_of_the_cluster_counts_then_any_and_one_asked_for_before_both(tmp_path: Path) -> None:
    environ, fake = written(tmp_path), FakeSlurm()
    found = {asked: site_defaults(asked, Slurm(fake), environ) for asked in (None, "elsewhere")}
    assert [item.profile for item in found.values() if item] == ["here", "elsewhere"]
    fake.away = True
    chosen = site_defaults(None, Slurm(fake), environ)
    assert chosen is not None
    assert chosen.profile == "anywhere"
    with pytest.raises(InputError, match=r"--site nosuch: no such profile in .*; there are: elsewhere, here, anywhere"):
        site_defaults("nosuch", Slurm(fake), environ)


def test_a_host_name_may_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = written(tmp_path)
    monkeypatch.setattr("platform.node", lambda: "login3.other.org")
    chosen = site_defaults(None, Slurm(FakeSlurm()), environ)
    assert chosen is not None
    assert chosen.profile == "elsewhere"


def test_without_a_file_nothing_is_asked(tmp_path: Path) -> None:
    fake = FakeSlurm()
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert site_defaults(None, Slurm(fake), environ) is None
    assert not fake.argvs
    with pytest.raises(InputError, match="--site here: there is no"):
        site_defaults("here", Slurm(fake), environ)
    assert site_file({"HOME": "/home/anna", "XDG_CONFIG_HOME": "relative"}) == Path(
        "/home/anna/.config/hpctrain/site.yaml"
    )


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("profiles:\n  a:\n    cluster: {acount: x}\n", 3, "unknown key; did you mean 'account'?"),
        ("profiles:\n  a:\n    cluster:\n      nodes: 4\n", 3, "nodes belongs into a run file"),
        ("profiles:\n  a: {match: x}\n", 2, "profiles.a.cluster: missing"),
        ("profiles: {}\n", 1, "profiles"),
        ("cluster: {account: x}\n", 1, "unknown key"),
        ("", 1, "found no keys"),
    ],
)
def test_a_mistake_has_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    environ = written(tmp_path, text)
    with pytest.raises(FileError) as caught:
        read_site(site_file(environ))
    assert any(f"site.yaml:{line}:" in told and words in told for told in str(caught.value).splitlines())


def test_a_run_file_wins_over_the_profile_and_set_over_both(tmp_path: Path) -> None:
    defaults = site_defaults("here", Slurm(FakeSlurm()), written(tmp_path))
    assert defaults is not None
    run_file = tmp_path / "run.yaml"
    mine = {"account": None, "mail": {"on": ["FAIL"]}, **RUN["cluster"]}
    run_file.write_text(yaml.safe_dump({**RUN, "cluster": mine}))
    cluster = read_run(run_file, (), defaults.values).cluster
    assert (cluster.account, cluster.setup, cluster.nodes) == (None, ["module load cuda"], "2")
    assert cluster.mail is not None
    assert (cluster.mail.user, cluster.mail.on) == ("anna@example.org", ["FAIL"])
    assert defaults.words(run_file, ()) == [f"from profile 'here' of {defaults.path}: cluster.mail.user, cluster.setup"]
    override = ("cluster.setup=[module load gcc]",)
    assert read_run(run_file, override, defaults.values).cluster.setup != cluster.setup
    assert defaults.words(run_file, override) == [f"from profile 'here' of {defaults.path}: cluster.mail.user"]


TREES = st.recursive(
    st.one_of(st.none(), st.integers()), lambda inner: st.dictionaries(st.sampled_from("abc"), inner), max_leaves=8
)
MAPPINGS = st.dictionaries(st.sampled_from("abc"), TREES)


@given(value=MAPPINGS, defaults=MAPPINGS)
def test_filling_changes_nothing_that_was_given_and_leaves_nothing_out(value: dict, defaults: dict) -> None:
    result = with_defaults(value, defaults)
    assert list(missing_values(result, defaults)) == []
    assert with_defaults(result, value) == result == with_defaults(result, defaults)
