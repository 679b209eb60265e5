"""The accounts of a user, as sacctmgr prints them."""

from __future__ import annotations

import pytest
from captured_slurm import CapturedSlurm
from fake_slurm import FakeSlurm
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.slurm.accounts import UserAccounts, parse_accounts
from hpctrain.slurm.commands import Slurm


@pytest.mark.parametrize(
    ("section", "accounts"),
    [
        ("several", UserAccounts(("bio", "astro"), "bio")),
        ("of_a_partition", UserAccounts(("chem",), "chem")),
        ("one", UserAccounts(("chem",), "chem")),
        ("unknown_user", UserAccounts((), None)),
        ("away", None),
        ("no_accounting", None),
    ],
)
def test_the_default_account_comes_first(section: str, accounts: UserAccounts | None) -> None:
    assert Slurm(CapturedSlurm({}, section), {}).accounts("anna") == accounts


def test_a_cluster_without_sacctmgr_has_no_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSlurm()
    slurm = Slurm(fake, {})
    slurm.config()
    fake.installed = False
    assert slurm.accounts("anna") is None


def test_accounts_of_another_cluster_do_not_count() -> None:
    text = "hydra|bio|bio|\nalps|chem|chem|\nalps|chem|astro|gpu\n"
    assert parse_accounts(text, "alps") == UserAccounts(("chem", "astro"), "chem")


LINE = st.lists(st.sampled_from(["hydra", "alps", "bio", "", "a b", "\x1b[31m", "\x00", "ß"]) | st.text(max_size=5))


@given(st.lists(LINE.map("|".join) | st.text(max_size=30)).map("\n".join))
def test_whatever_it_prints_names_can_be_shown(text: str) -> None:
    accounts = parse_accounts(text, "hydra")
    assert all(name and name.isprintable() for name in accounts.names)
    assert len(set(accounts.names)) == len(accounts.names)
    assert accounts.default is None or accounts.default == accounts.names[0]
