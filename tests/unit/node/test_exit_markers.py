"""When nobody is left to wait for: srun would wait for a dead node's task until Slurm gives the node up."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.node.exit_markers import ScriptWatch, report_batch_node_loss, too_few_left, write_exit_marker


@pytest.mark.parametrize(
    ("left", "members", "min_nodes", "over"),
    [
        (["a"], "abc", 1, False),  # an isolated node: the others train on
        (["a", "b"], "abc", 1, True),  # one of three may not go on
        (["a"], "ab", 1, False),  # half may
        (["a"], "ab", 2, True),
        (["a", "b"], "abcd", 3, True),
        (["a", "b"], "abcd", 2, False),
        (["x"], "abc", 1, False),  # a spare was not in the generation
    ],
)
def test_an_attempt_is_over_when_those_that_have_not_left_cannot_go_on(
    left: list[str], members: str, min_nodes: int, over: bool
) -> None:
    assert too_few_left(left, list(members), min_nodes) is over


def test_the_last_that_matters_tells_the_job_script(tmp_path: Path) -> None:
    write_exit_marker(tmp_path, 2, "a", ["a", "b", "c"], 1, 75)
    assert not (tmp_path / "left" / "2.code").exists()
    write_exit_marker(tmp_path, 2, "b", ["a", "b", "c"], 1, 75)
    assert (tmp_path / "left" / "2.code").read_text() == "75\n"
    assert not (tmp_path / "left" / "1.code").exists()


def test_the_first_that_finds_too_few_left_ends_the_attempt_of_a_lost_script(tmp_path: Path) -> None:
    closer = tmp_path / "left" / "2.closer"
    write_exit_marker(tmp_path, 2, "a", ["a", "b", "c"], 1, 75, batch_host="c")
    assert not closer.exists()
    write_exit_marker(tmp_path, 2, "b", ["a", "b", "c"], 1, 75, batch_host="c")
    assert not ScriptWatch(tmp_path, 2, "c").is_alive()
    # A script's node that leaves in order has its script, which may end the job.
    write_exit_marker(tmp_path, 2, "c", ["a", "b", "c"], 1, 75, batch_host="c")
    assert closer.read_text() == "b\n"
    assert ScriptWatch(tmp_path, 2, "c").is_alive()


def test_the_shell_that_watches_the_script_hears_of_the_loss_of_its_node(tmp_path: Path) -> None:
    (tmp_path / "left").mkdir()
    for node in "bc":
        (tmp_path / "left" / f"2.since-{node}").touch()
    for node, lost in (("b", "a"), ("c", "b"), ("d", "a")):
        report_batch_node_loss(tmp_path, 2, node, "a", lost)
    assert [path.name for path in (tmp_path / "left").glob("2.lost-*")] == ["2.lost-b"]


def test_nobody_is_to_end_the_job_of_a_script_whose_node_left_in_order(tmp_path: Path) -> None:
    for node in "ab":
        write_exit_marker(tmp_path, 0, node, ["a", "b"], 1, 75, batch_host="a")
    assert (tmp_path / "left" / "0.code").exists()
    assert not (tmp_path / "left" / "0.closer").exists()
