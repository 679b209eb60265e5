"""Node features and the constraints that ask for them, as far as they can be told without Slurm."""

from __future__ import annotations

import re
from collections.abc import Collection

_OPERATOR = re.compile(r"[&,|]")


def has_features(constraint: str, features: Collection[str]) -> bool | None:
    """Whether a node with these features satisfies the constraint: 'a100&nvlink' both, 'a100|h100' either.

    None for the forms that are about several nodes at once, or that mix both (sbatch(1), --constraint): only Slurm
    knows.
    """
    operators = {"&" if operator in "&," else "|" for operator in _OPERATOR.findall(constraint)}
    if len(operators) > 1 or any(character in constraint for character in "[]()*"):
        return None
    found = [name in features for name in _OPERATOR.split(constraint) if name]
    return any(found) if operators == {"|"} else all(found)


def constraint_of_groups(groups: Collection[tuple[str, int]]) -> str:
    """One constraint for nodes of several kinds: [('a100', 2), ('v100&big', 1)] -> '[a100*2&(v100&big)*1]'.

    sbatch(1), --constraint, "Multiple Counts": one job, and so one step, spans them all.
    """
    return "[" + "&".join(f"({names})*{count}" if "&" in names else f"{names}*{count}" for names, count in groups) + "]"
