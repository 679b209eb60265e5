"""Parses and formats times as Slurm writes them: limits ("1-12:30:15") and moments (seconds since 1970, or local ISO
8601)."""

from __future__ import annotations

import re
from datetime import datetime

_NO_LIMIT = ("unlimited", "infinite", "-1")
_FORMS = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes:seconds, UNLIMITED"
_PLAIN = re.compile(r"(?:(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+)|(?P<minutes>\d+))", re.ASCII)
_DAYS = re.compile(r"(?P<d>\d+)-(?P<h>\d+)(?::(?P<m>\d+)(?::(?P<s>\d+))?)?", re.ASCII)
_YEAR_10000_S = 253402300800.0
"""The first moment that `datetime` cannot write as a date."""
_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1, "minutes": 60}


def parse_time_limit(text: str) -> int | None:
    """Return the seconds of a time limit in any form that sbatch accepts; None without a limit (UNLIMITED, 0).

    "30" is minutes, "1:30:00" hours, minutes and seconds, "2-0" days and hours.

    Raises:
        ValueError: the text has none of these forms.
    """
    text = text.strip()
    if text.lower() in _NO_LIMIT:
        return None
    form = _DAYS.fullmatch(text) or _PLAIN.fullmatch(text)
    if not form:
        raise ValueError(f"found '{text}'; allowed: {_FORMS}")
    parts = form.groupdict()
    # sbatch reads a limit of zero as no limit.
    return sum(int(value) * _UNITS_S[name] for name, value in parts.items() if value) or None


def format_time_limit(seconds: int | None) -> str:
    """Return a time limit as Slurm prints it: 5400 -> '01:30:00', 131415 -> '1-12:30:15', None -> 'UNLIMITED'."""
    if seconds is None:
        return "UNLIMITED"
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def read_duration(text: str) -> int | None:
    """Return the seconds of a limit in Slurm's output; None for no limit and for an unknown one."""
    try:
        return parse_time_limit(text)
    except ValueError:
        return None  # NONE, NOT_SET, INVALID, Partition_Limit, n/a, (null)


def read_moment(text: str) -> float | None:
    """Return the seconds since 1970-01-01 UTC of a moment in Slurm's output; None for Unknown, N/A and None.

    hpctrain asks Slurm for seconds (SLURM_TIME_FORMAT=%s); the default form is local time without a zone.
    """
    try:
        seconds = float(text) if text.isascii() and text.isdigit() else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds < _YEAR_10000_S else None
