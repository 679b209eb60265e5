"""Events in words."""

from __future__ import annotations

from typing import get_args

import pytest

from hpctrain.records.history.run_log import EventKind
from hpctrain.report.event_text import describe_event, signal_name


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        ("worker_died", {"node": "local2", "signal": 9}, "worker of local2 was killed (SIGKILL)"),
        ("worker_died", {"node": "n7", "rank": 3, "signal": "SIGTERM"}, "worker of n7 (rank 3) was killed (SIGTERM)"),
        ("worker_died", {"node": "n7", "exit_code": 76}, "worker of n7 ended with exit code 76 (fault of the machine)"),
        ("worker_died", {"node": "n7", "exit_code": 1}, "worker of n7 ended with exit code 1"),
        (
            "worker_died",
            {"node": "n7", "rank": 3, "signal": 11, "step": 8, "operation": "forward stage 1 micro-batch 2"},
            "worker of n7 (rank 3) was killed (SIGSEGV) in step 8, forward stage 1 micro-batch 2",
        ),
        ("node_lost", {"node": "local3"}, "node local3 was lost"),
        ("node_lost", {"node": "local3", "crashed": True}, "node lost"),
        ("node_returned", {"node": "local3"}, "node local3 came back"),
        (
            "generation_started",
            {"members": ["a", "b", "c", "d"], "restore_step": 50, "pp": 2, "dp": 2, "tp": 1},
            "generation 1 starts from step 50 on 4 nodes (pp 2 × dp 2 × tp 1)",
        ),
        (
            "generation_started",
            {"members": ["a"], "restore_step": 50, "memory": {"step": 50}},
            "generation 1 starts from step 50 in memory on 1 node",
        ),
        ("generation_started", {"members": ["a"], "restore_step": None}, "generation 1 starts from the seed on 1 node"),
        (
            "generation_started",
            {"members": ["a"], "first_weights": "the folder /models/gpt2"},
            "generation 1 starts from the folder /models/gpt2 on 1 node",
        ),
        (
            "generation_started",
            {"members": ["a"], "restore": "checkpoints/step-00000004", "first_weights": "the folder /models/gpt2"},
            "generation 1 starts from step 4 on 1 node",
        ),
        ("recovered", {"seconds": 6.2, "step": 51}, "training goes on with step 51, 6.2 s after the fault was seen"),
        (
            "checkpoint_saved",
            {"step": 50, "seconds": 0.4, "bytes": 12_582_912},
            "checkpoint of step 50 saved in 400 ms (12.0 MiB)",
        ),
        ("finished", {"step": 200, "loss": 4.21}, "finished at step 200 with loss 4.21"),
    ],
)
def test_the_words_of_each_kind(make, kind, data, expected):
    assert describe_event(make.event(kind, 1, 1, "", **data)) == expected


@pytest.mark.parametrize("kind", get_args(EventKind))
def test_every_kind_has_words_without_data(make, kind):
    assert describe_event(make.event(kind, 1))


@pytest.mark.parametrize("kind", ["attempt_started", "planned", "preempted", "checkpoint_skipped", "failed"])
def test_what_only_the_reason_tells_is_in_the_words(make, kind):
    assert describe_event(make.event(kind, 1, 0, "because of this.")).endswith("because of this")


def test_a_signal_that_has_no_name_keeps_its_number():
    assert signal_name(200) == "signal 200"
