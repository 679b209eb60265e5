"""The settings for cleaning text before it becomes tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpctrain.records.format.document import Part


class Cleaning(Part):
    """Cleaning steps in the order in which they run; by default the text stays as it is."""

    normalize: Literal["none", "nfkc"] = "none"
    """nfkc: Unicode's compatibility composition (UAX #15): full-width letters, ligatures and the like become plain."""
    whitespace: Literal["keep", "collapse"] = "keep"
    """collapse: a run of white space becomes one line end if it contains one, else one blank; both ends are trimmed."""
    sentences: str | None = Field(default=None, pattern=r"^[a-z]{2,3}$")
    """Language code, as 'en': each sentence gets its own line, by the rules of spaCy's sentencizer."""


NO_CLEANING = Cleaning()
"""No cleaning step."""
