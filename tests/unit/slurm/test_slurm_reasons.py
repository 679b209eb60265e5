"""Families of reasons that cannot all be produced on a small cluster."""

from __future__ import annotations

import pytest

from hpctrain.slurm.pending_reasons import is_stuck, pending_reason_text


@pytest.mark.parametrize(
    ("reason", "words", "stuck"),
    [
        ("QOSMaxJobsPerUserLimit", "the QOS is at its limit; it starts when other jobs", False),
        ("QOSMaxNodePerJobLimit", "the QOS allows no job like this one", True),
        ("QOSMaxWallDurationPerJobLimit", "allows no job like this one", True),
        ("QOSMinGRES", "allows no job like this one", True),
        ("QOSGrpGRES", "the QOS is at its limit", False),
        ("QOSGrpCPUMinutesLimit", "used up its computing time", False),
        ("AssocGrpBilling", "the account is at its limit", False),
        ("AssocMaxCPUMinutesPerJobLimit", "the account allows no job like this one", True),
        ("JobHoldMaxRequeue", "scontrol release 7", True),
        ("launch_failure_limit_exceeded_requeued_held", "scontrol release 7", True),
        ("MaxMemPerLimit", "more memory than the partition", True),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions", "kept", False),
        ("ReqNodeNotAvail,_Reserved_for_maintenance", "Reserved for maintenance", False),
        ("Job's_account_not_permitted_to_use_this_partition_(x)", "may not use the partition", True),
        ("", "not looked at it yet", False),
        ("A_site's_own_words", "A site's own words", False),
        ("BrandNewReason", "BrandNewReason", False),
    ],
)
def test_words(reason, words, stuck):
    assert words in pending_reason_text(reason, "7")
    assert is_stuck(reason) is stuck


@pytest.mark.parametrize("reason", ["Priority", "PartitionDown", "JobHeldAdmin", "QOSGrpNodeLimit", "AssocGrpMemLimit"])
def test_the_code_is_kept_to_search_for(reason):
    assert pending_reason_text(reason, "7").endswith(f"({reason})")
