"""Parser of sacctmgr's answer about a user: the accounts to which the user's jobs can be charged."""

from __future__ import annotations

from dataclasses import dataclass

_COLUMNS = ("Cluster", "DefaultAccount", "Account", "Partition")


@dataclass(frozen=True)
class UserAccounts:
    """The accounts of one user on one cluster, which Slurm's accounting calls associations."""

    names: tuple[str, ...]
    """Names of the accounts, the default one first, the others in alphabetical order."""
    default: str | None
    """The account to which a job is charged that names none; None: the user has no default account."""


def sacctmgr_argv(user: str) -> list[str]:
    """Return the command that asks accounting for the accounts of a user, for `parse_accounts`."""
    return ["sacctmgr", "-nP", "show", "user", user, "withassoc", f"format={','.join(_COLUMNS)}"]


def parse_accounts(text: str, cluster: str) -> UserAccounts:
    """Return the user's accounts in sacctmgr's answer.

    An account that the user may use in some partitions only is returned, too; sbatch refuses it in other partitions.
    Lines of other clusters, and lines with other columns, are skipped.

    Args:
        cluster: name of the cluster; accounting may know several.
    """
    names, default = set(), None
    for line in text.splitlines():
        values = line.split("|")
        if len(values) != len(_COLUMNS) or values[0] != cluster or not values[2].isprintable() or not values[2]:
            continue
        names.add(values[2])
        if values[1] == values[2]:
            default = values[2]
    return UserAccounts(tuple(sorted(names, key=lambda name: (name != default, name))), default)
