"""Text to train on that stays the same when the package changes: what a small model learns of it is asserted."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

TEXT = Path(asyncio.__file__).parent
"""Half a megabyte of Python's standard library."""


def prepare_text(folder: Path) -> None:
    """`hpctrain data prepare` of that text into `folder/data`; tokens are bytes."""
    words = ["data", "prepare", str(TEXT), "-o", str(folder / "data"), "--tokenizer", "bytes"]
    subprocess.run([sys.executable, "-m", "hpctrain", *words], check=True, capture_output=True)
