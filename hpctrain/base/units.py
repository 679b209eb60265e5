"""Formats bytes, seconds, counts and rates for a person. Files hold plain SI values; only text for people is
rounded."""

from __future__ import annotations

_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_bytes(count: float) -> str:
    """Return bytes in binary units: 1536 -> '1.5 KiB'."""
    for size, name in _BINARY:
        if abs(count) >= size:
            return f"{count / size:.1f} {name}"
    return f"{count:.0f} B"


def format_si(value: float, unit: str) -> str:
    """Return a value with an SI prefix: (2.5e9, 'B/s') -> '2.5 GB/s'."""
    for size, prefix in _SI:
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """Return seconds in a readable unit: 0.00012 -> '120 us', 95 -> '1 min 35 s'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_age(seconds: float) -> str:
    """Return an age in its largest whole unit: 95 -> '1 min', 100_000 -> '27 h', 5_000_000 -> '57 d'."""
    for unit, unit_s, below_s in (("s", 1, 60), ("min", 60, 3600), ("h", 3600, 48 * 3600)):
        if seconds < below_s:
            return f"{int(seconds // unit_s)} {unit}"
    return f"{int(seconds // 86400)} d"


def format_delta(seconds: float) -> str:
    """Return a difference in seconds with its sign: 0.12 -> '+120 ms', -2.0 -> '-2 s'."""
    return ("-" if seconds < 0 else "+") + format_seconds(abs(seconds))


def format_count(count: float) -> str:
    """Return a count with an SI prefix: 1_300_000_000 -> '1.3G'."""
    return format_si(count, "").replace(" ", "")
