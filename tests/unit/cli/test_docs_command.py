"""`docs`: the pages that come with the package."""

from __future__ import annotations

import pytest

from hpctrain.base.errors import InputError


def test_pages_are_listed_with_their_titles(repository, hpctrain):
    lines = hpctrain("docs").stdout.splitlines()
    assert any(line.split(maxsplit=1) == ["submitting", "Submitting a run"] for line in lines)
    names = [line.split()[0] for line in lines]
    assert "decisions" in names
    assert not any(name.startswith("decisions/") for name in names)  # its own page lists them


@pytest.mark.parametrize("name", ["submitting", "docs/submitting.md", "decisions", "decisions/0069-images"])
def test_a_page_is_printed_as_it_is_written(repository, hpctrain, name):
    path = {"decisions": "decisions/README"}.get(name, name.removeprefix("docs/").removesuffix(".md"))
    assert hpctrain("docs", name).stdout == (repository / "docs" / f"{path}.md").read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("submiting", "no page 'submiting'; did you mean 'submitting'?"),
        ("../CHANGELOG", "no page '../CHANGELOG'; `hpctrain docs` lists the pages"),
    ],
)
def test_an_unknown_page_is_answered_with_what_is_there(hpctrain, name, words):
    result = hpctrain("docs", name)
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == words
