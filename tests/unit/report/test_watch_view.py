"""What `hpctrain watch` draws."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console
from run_folders import event

from hpctrain.report.status import RunStatus
from hpctrain.report.terminal import PlainView, node_states, render_watch_view

STATUS = RunStatus(
    state="running", reason="step 30 done in 1 s", name="gpt", attempt=1, generation=2, step=30, steps=90,
    nodes=["n1", "n2"], recoveries=1, lost_steps=0, loss=2.5, tokens_per_s=1200.0, eta_s=65.0,
)  # fmt: skip
BEGIN = event("attempt_started", -1, nodes=["n1", "n2", "n3"])


def text(*args) -> str:
    out = io.StringIO()
    Console(file=out, width=100, no_color=True).print(render_watch_view(*args))
    return out.getvalue()


def test_the_view_holds_what_one_looks_for():
    lost = event("node_lost", 1, node="n3")
    start = event("generation_started", 2, members=["n1", "n2"], pp=1, dp=2, tp=1)
    shown = text(STATUS, [BEGIN, lost, start], "7", 0.0)
    for part in (
        "gpt  running  step 30 done", "step 30/90", "1 min 5 s left", "loss 2.5000  1.2k tokens/s",
        "attempt 1  generation 2  job 7", "n1 takes part, n2 takes part, n3 lost", "node n3 was lost",
    ):  # fmt: skip
        assert part in shown, part


def test_times_of_the_day_say_their_zone():
    assert "11:06:40Z  attempt" in text(STATUS, [BEGIN], "7", 0.0)
    assert PlainView().lines(STATUS, [BEGIN], 0.0)[0].startswith("11:06:40Z  attempt")


def test_a_waiting_run_shows_when_it_may_start():
    waiting = RunStatus("queued", "job 7: x (Priority)", "gpt", 0, 0, 0, 90, [], 0, 0, expected_start_s=7200.0)
    shown = text(waiting, [], "7", 0.0)
    assert "Slurm expects to start it in 2 h 0 min (1970-01-01T02:00:00Z)" in shown
    assert "loss" not in shown


def test_nodes_of_the_newest_attempt():
    first = [BEGIN, event("generation_started", 0, members=["n1", "n2", "n3"]), event("node_lost", 0, node="n2")]
    assert node_states(first) == {"n1": "takes part", "n2": "lost", "n3": "takes part"}
    assert node_states([*first, event("node_returned", 0, node="n2")])["n2"] == "back"
    again = event("attempt_started", -1, nodes=["n4"])
    assert node_states([*first, again]) == {"n4": "starts"}


def test_the_end_of_the_attempt_before_is_told_once_where_the_reason_has_it():
    ended = "attempt 0 ended (infrastructure): Slurm ended the job: NODE_FAIL"
    assert ended in text(replace(STATUS, last_end=ended), [BEGIN], "7", 0.0)
    told = replace(STATUS, last_end=ended, reason="Slurm ended the job: NODE_FAIL")
    assert "attempt 0 ended" not in text(told, [BEGIN], "7", 0.0)
