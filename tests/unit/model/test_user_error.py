"""One line about an error of a person's own code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hpctrain.model.imported.user_error import describe_user_error


@pytest.fixture
def raised(tmp_path: Path) -> Callable[[str], BaseException]:
    """The error of code that lies in a file of a person's."""

    def run(code: str) -> BaseException:
        path = tmp_path / "mine.py"
        path.write_text(code)
        try:
            exec(compile(code, str(path), "exec"), {"torch": torch, "nn": nn})
        except Exception as error:
            return error
        raise AssertionError("nothing was raised")

    return run


def test_the_line_names_kind_text_file_and_line(raised: Callable[[str], BaseException], tmp_path: Path) -> None:
    error = raised("x = 1\nraise ValueError('two\\n  lines')\n")
    place = f"(line 2 of {tmp_path}/mine.py: raise ValueError('two\\n  lines'))"
    assert describe_user_error(error) == f"ValueError: two lines {place}"


def test_the_place_is_in_the_persons_code_where_a_library_raised(
    raised: Callable[[str], BaseException], tmp_path: Path
) -> None:
    error = raised("\n\nnn.Linear(3, 4)(torch.zeros(2, 5))\n")
    assert f"(line 3 of {tmp_path}/mine.py: nn.Linear(3, 4)(torch.zeros(2, 5)))" in describe_user_error(error)
    assert "mat1 and mat2 shapes cannot be multiplied" in describe_user_error(error)
    decoding = raised("import json\njson.loads('{')\n")
    assert f"(line 2 of {tmp_path}/mine.py: json.loads('{{'))" in describe_user_error(decoding)


def test_a_text_without_end_is_cut_and_one_without_text_is_its_kind(raised: Callable[[str], BaseException]) -> None:
    assert len(describe_user_error(raised(f"raise OSError('{'x' * 10_000}')")).partition(" (line")[0]) < 320
    assert describe_user_error(KeyError()) == "KeyError"
