"""What is done to text before it becomes tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpctrain.records.format.document import Part


class Cleaning(Part):
    """Steps in the order in which they are done; without any, tokens are those of the text as it is."""

    normalize: Literal["none", "nfkc"] = "none"
    """nfkc: Unicode's compatible composed form (UAX #15): full-width letters, ligatures and the like become plain."""
    whitespace: Literal["keep", "collapse"] = "keep"
    """collapse: a run of white space becomes one line end where it holds one, else one blank; none at the ends."""
    sentences: str | None = Field(default=None, pattern=r"^[a-z]{2,3}$")
    """Code of a language, as 'en': each sentence gets its own line, by the rules of spaCy's sentencizer."""


NO_CLEANING = Cleaning()
"""Nothing is done."""
