"""Cleaning as in the paper's section 3.6. spaCy takes seconds to load: this is the one file of the tests that does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.base.errors import InputError
from hpctrain.corpus.input.passages import Passage
from hpctrain.corpus.prepare.encode import Cleaner, check_cleaning
from hpctrain.records.corpus import Cleaning


def cleaned(text: str, ends: bool = True, **steps: str) -> str:
    return Cleaner(Cleaning.model_validate(steps)).texts([Passage(text, len(text.encode()), ends)])[0]


@pytest.fixture(scope="module")
def sentences() -> Cleaner:
    return Cleaner(Cleaning(sentences="en", whitespace="collapse", normalize="nfkc"))


def test_without_steps_nothing_changes() -> None:
    assert cleaned(" ﬁne \t\n") == " ﬁne \t\n"


def test_nfkc_makes_compatible_characters_plain() -> None:
    assert cleaned("ﬁne ＡＢＣ ① e\u0301", normalize="nfkc") == "fine ABC 1 é"


def test_runs_of_white_space_become_one_line_end_or_one_blank() -> None:
    assert cleaned("  a \t b\u00a0c \n\n \r\n d\r\n", whitespace="collapse") == "a b c\nd"


def test_a_passage_that_goes_on_keeps_what_parts_it_from_the_next() -> None:
    for text, expected in (("a \n ", "a\n"), ("a  ", "a "), ("a", "a")):
        assert cleaned(text, ends=False, whitespace="collapse") == expected


def test_each_sentence_gets_its_line(sentences: Cleaner) -> None:
    text = "Dr. Who came.  He left!  Did he?\nYes … “He did.” Costs ½ of 3.5 units."
    expected = "Dr. Who came.\nHe left!\nDid he?\nYes … “He did.”\nCosts 1⁄2 of 3.5 units."
    (found,) = sentences.texts([Passage(text, 0, True)])
    assert found.replace("...", "…") == expected


@settings(max_examples=30)
@given(text=st.text(st.sampled_from("ab.!? \n\t…。"), max_size=60))
def test_sentences_change_white_space_only(sentences: Cleaner, text: str) -> None:
    (found,) = sentences.texts([Passage(text, 0, True)])
    assert "".join(found.split()) == "".join(cleaned(text, normalize="nfkc").split())
    assert "\n\n" not in found


def test_more_than_a_million_characters_are_no_trouble(sentences: Cleaner) -> None:
    text = "a" * 1_000_001  # of NFKC's making: a passage has less
    assert sentences.texts([Passage(text, 0, True)]) == [text]


def test_a_language_that_spacy_does_not_know_is_told() -> None:
    with pytest.raises(InputError, match="--sentences qq: spaCy knows no such language"):
        check_cleaning(Cleaning(sentences="qq"))
