"""Evaluates constraints on node features, as far as that is possible without asking Slurm."""

from __future__ import annotations

import re
from collections.abc import Collection

_OPERATOR = re.compile(r"[&,|]")


def has_features(constraint: str, features: Collection[str]) -> bool | None:
    """Whether a node with these features satisfies the constraint: 'a100&nvlink' needs both, 'a100|h100' either.

    None for constraints on several nodes at once, or with both operators (sbatch(1), --constraint), which only Slurm
    can evaluate.
    """
    operators = {"&" if operator in "&," else "|" for operator in _OPERATOR.findall(constraint)}
    if len(operators) > 1 or any(character in constraint for character in "[]()*"):
        return None
    matches = [name in features for name in _OPERATOR.split(constraint) if name]
    return any(matches) if operators == {"|"} else all(matches)


def constraint_of_groups(groups: Collection[tuple[str, int]]) -> str:
    """Return one constraint for nodes of several kinds: [('a100', 2), ('v100&big', 1)] -> '[a100*2&(v100&big)*1]'.

    One job, and so one step, spans all of these nodes (sbatch(1), --constraint, "Multiple Counts").
    """
    return "[" + "&".join(f"({names})*{count}" if "&" in names else f"{names}*{count}" for names, count in groups) + "]"
