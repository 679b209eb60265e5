"""Types of the figures in topology.json, with the smallest and largest value that a file may have.

The bounds are far from any device or network that exists. They keep times of a step, which are sums, products and
quotients of figures, finite. Texts and true or false are no figures.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

RATE_MAX = 1e24
"""Highest FLOP/s, bytes/s and watts."""
SECONDS_MAX = 1e6
"""Longest time, seconds: eleven days."""

Rate = Annotated[float, Field(strict=True, ge=1.0, le=RATE_MAX)]
"""FLOP/s or bytes/s: at least 1."""
Seconds = Annotated[float, Field(strict=True, ge=0.0, le=SECONDS_MAX)]
"""Time in seconds. 0 is allowed, because a fitted start-up time may be 0."""
PositiveSeconds = Annotated[float, Field(strict=True, ge=1e-12, le=SECONDS_MAX)]
"""Time in seconds, at least a picosecond."""
SecondsPerByte = Annotated[float, Field(strict=True, ge=0.0, le=1.0)]
"""Seconds per byte. 0 is allowed: messages whose time does not grow with their size."""
PositiveSecondsPerByte = Annotated[float, Field(strict=True, ge=1 / RATE_MAX, le=1.0)]
"""Seconds per byte, or per number of a gradient, above 0."""
Bytes = Annotated[float, Field(strict=True, ge=1.0, le=2.0**60)]
"""Size of a memory in bytes."""
Ratio = Annotated[float, Field(strict=True, ge=0.0, le=1e9)]
"""A quotient of two figures, such as a jitter."""
Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
"""A number of things."""
Level = Annotated[int, Field(strict=True, ge=0, le=100)]
"""Level of a switch in the tree of switches."""
