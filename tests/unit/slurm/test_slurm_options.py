"""Items of cluster.sbatch: one option each, by its whole name."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.slurm.options import NAMES, parse_sbatch_option


@pytest.mark.parametrize(
    ("item", "option"),
    [
        ("--hold", ("hold", "")),
        ("--mem=0", ("mem", "0")),
        ("--time 10", ("time", "10")),
        ("--comment=", ("comment", "")),
        ('--comment="two words # here"', ("comment", "two words # here")),
        ("--comment 'a --nodes=9'", ("comment", "a --nodes=9")),
        ("--comment='\"'", ("comment", '"')),
        ("--gres=gpu:a100:4,shard:2", ("gres", "gpu:a100:4,shard:2")),
        ("--exclude=n[1-3,7]", ("exclude", "n[1-3,7]")),
        ("--container-image=nvidia+pytorch:25.01", ("container-image", "nvidia+pytorch:25.01")),
        ("--gpus=4", ("gpus", "4")),
        ("--ntasks=2", ("ntasks", "2")),
    ],
)
def test_an_option_is_a_name_and_a_value(item: str, option: tuple[str, str]) -> None:
    assert parse_sbatch_option(item) == option


@pytest.mark.parametrize(
    "item",
    [
        "--comment=x --nodes=9",
        "--comment x --nodes=9",
        "--comment=x\t--nodes=9",
        "--comment=x\x0b--nodes=9",
        "--exclusive --nodes=9",
        "--comment --nodes=9",
        '--comment="x" --nodes=9',
        '--comment="x"--nodes=9',
        "--comment=x\\ --nodes=9",
        '--comment="x\\" --nodes=9"',
        "--comment='x' '--nodes=9'",
        "--comment=x#y",
        "--comment=x # --hold",
        '--comment="x',
        "--",
        "-- --nodes=9",
        "--comment=a\n--nodes=9",
    ],
)
def test_a_second_option_in_an_item_is_refused(item: str) -> None:
    with pytest.raises(ValueError, match="more than one option"):
        parse_sbatch_option(item)


@pytest.mark.parametrize(
    ("item", "whole"),
    [
        ("--requ", "--requeue"),
        ("--nod=9", "--nodefile, --nodelist, --nodes"),
        ("--no-r", "--no-requeue"),
        ("--ti 9", "--time"),
    ],
)
def test_abbreviations_are_refused_with_the_whole_name(item: str, whole: str) -> None:
    """getopt_long takes any beginning that fits one option."""
    with pytest.raises(ValueError, match="is an abbreviation; write the whole name: ") as caught:
        parse_sbatch_option(item)
    assert whole in str(caught.value)


@given(st.text(st.sampled_from("-- =\"'\\#ab\t\nn"), max_size=14).map(lambda text: f"--comment{text}"))
def test_what_is_taken_is_one_option_for_a_shell_too(item: str) -> None:
    """A shell's words are sbatch's but for details of the backslash, which nothing that is taken has."""
    try:
        name, value = parse_sbatch_option(item)
    except ValueError:
        return
    words = shlex.split(item, comments=True)
    assert words in ([f"--{name}={value}"], [f"--{name}", value], [f"--{name}"])


@given(st.sampled_from(NAMES))
def test_every_option_is_taken_by_its_whole_name(name: str) -> None:
    assert parse_sbatch_option(f"--{name}=1") == (name, "1")
