"""Translates the reason for which Slurm lets a job wait into plain words. The reasons are listed in the man page of
squeue (%r)."""

from __future__ import annotations

import re

_WORDS = {
    "Priority": "other jobs come first; it gets its turn, sooner with a shorter cluster.time or fewer cluster.nodes",
    "Resources": "it is next; enough free nodes are missing; fewer nodes or a shorter cluster.time may fit a gap",
    "Dependency": "it waits for another job, and starts when that one has ended",
    "PartitionDown": "the partition is down; its jobs start when the site opens it again",
    "PartitionInactive": "the partition starts no jobs at present; wait, or take another cluster.partition",
    "BeginTime": "it may not start yet",
    "Licenses": "a licence it asked for is in use; it starts when that is given back",
    "Reservation": "it waits for its reservation to begin; `scontrol show reservation` tells when",
    "JobArrayTaskLimit": "as many tasks of its array run as it allows at once",
    "Cleaning": "it was put back into the queue; its last attempt is still being cleared away",
    "Prolog": "the nodes are being prepared",
    "NodeDown": "a node that it needs is down; wait for it, or name no nodes in cluster.sbatch",
    "SchedDefer": "the site starts jobs in rounds; it was not its turn yet",
    "WaitingForScheduling": "the scheduler has not looked at it yet",
    "FrontEndDown": "no front-end node is available",
    "BurstBufferResources": "the burst buffer is full",
    "BurstBufferStageIn": "its files are being copied to the burst buffer",
    "PowerNotAvail": "the site's power limit is reached",
    "QOSUsageThreshold": "the QOS allows no more until earlier usage has decayed",
}
"""Reason -> text, for reasons that pass by themselves."""

_STUCK = {
    "DependencyNeverSatisfied": "the job it waits for failed, so it never starts; cancel it and submit again",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives to one job; lower cluster.nodes",
    "PartitionTimeLimit": "it asks for more time than the partition gives; lower cluster.time",
    "JobHeldUser": "it is held; let it go with `scontrol release {job}`",
    "JobHeldAdmin": "the site holds it; ask its administrators",
    "JobHoldMaxRequeue": "it was put back into the queue too often, so Slurm holds it; look at the nodes it failed on, "
    "then `scontrol release {job}`",
    "launch failed requeued held": "it could not be started on its node, so Slurm holds it; exclude that node or tell "
    "the site, then `scontrol release {job}`",
    "launch failure limit exceeded requeued held": "it could not be started on any of several tries, so Slurm holds "
    "it; exclude the nodes it failed on or tell the site, then `scontrol release {job}`",
    "job requeued in held state": "it was put back into the queue and is held; let it go with `scontrol release {job}`",
    "BadConstraints": "no node can ever satisfy what it asks for; change the request",
    "JobLaunchFailure": "it could not be launched; look at its output and the file systems",
    "SystemFailure": "Slurm, a file system or the network failed; tell the site",
    "InvalidAccount": "its account is not valid; correct cluster.account",
    "InvalidQOS": "its QOS is not valid; correct cluster.qos",
    "AccountNotAllowed": "its account may not use the partition; correct cluster.account or cluster.partition",
    "QOSNotAllowed": "its QOS may not be used in the partition; correct cluster.qos or cluster.partition",
    "AssociationTimeLimit": "its account allows no job this long; lower cluster.time",
    "QOSTimeLimit": "its QOS allows no job this long; lower cluster.time",
    "ReservationDeleted": "its reservation was deleted; submit it without",
    "MaxMemPerLimit": "it asks for more memory than the partition gives; ask for less",
    "DeadLine": "it cannot end before its deadline; lower cluster.time, or leave out --deadline in cluster.sbatch",
}
"""Reason -> text, for reasons that stay until a person acts."""

_UNAVAILABLE = re.compile(r"UnavailableNodes:(?P<nodes>\S+)")
_LIMIT = re.compile(r"(?P<owner>QOS|Assoc)(?P<scope>Grp|Max|Min)?(?P<what>[A-Za-z]*)")
_NOT_KNOWN = re.compile(r"Job's (?:account|QOS) not")


def pending_reason_text(reason: str, job: str) -> str:
    """Return a waiting job's reason in plain words, followed by Slurm's code, so that it can be searched for. A reason
    that is not known here is returned as Slurm gives it, with blanks between words.

    Args:
        reason: Slurm's code or text, '_' or blanks between words; "" where Slurm gives none.
        job: the job's id, for the command that the text may advise.
    """
    if not reason:
        return "the scheduler has not looked at it yet"
    known = _WORDS.get(reason) or _STUCK.get(_plain(reason))
    if known:
        return f"{known.format(job=job)} ({reason})"
    return _by_shape(reason) or _plain(reason)


def is_stuck(reason: str) -> bool:
    """Return whether a job that waits for this reason waits until a person acts; an unknown reason is taken to pass by
    itself."""
    if _plain(reason) in _STUCK or _NOT_KNOWN.match(_plain(reason)):
        return True
    limit = _LIMIT.fullmatch(reason)
    return limit is not None and _is_about_one_job(limit)


def _plain(reason: str) -> str:
    # scontrol writes '_' for the blanks of a sentence; a code is one word without them.
    return reason.replace("_", " ")


def _by_shape(reason: str) -> str | None:
    """Return the plain words for a reason that contains node names or belongs to a family, such as limits; None for any
    other reason."""
    unavailable = _UNAVAILABLE.search(reason)
    if unavailable:
        return f"nodes it needs are down, drained or reserved: {unavailable['nodes']} ({reason.split(',')[0]})"
    if reason.startswith("ReqNodeNotAvail"):
        return f"nodes it needs are in use, down or reserved ({_plain(reason)})"
    if _plain(reason).startswith("Nodes required for job are DOWN"):
        return "the nodes it needs are down, drained or kept for jobs of higher priority"
    if _NOT_KNOWN.match(_plain(reason)):
        return f"it may not use the partition: {_plain(reason)}"
    limit = _LIMIT.fullmatch(reason)
    return _limit_words(limit) if limit else None


def _limit_words(limit: re.Match[str]) -> str:
    whose = "the QOS" if limit["owner"] == "QOS" else "the account"
    if _is_about_one_job(limit):
        return f"{whose} allows no job like this one; ask for less, or for more if it names a minimum ({limit[0]})"
    if "Minutes" in limit["what"]:
        return f"{whose} has used up its computing time; it starts when older usage has decayed ({limit[0]})"
    return f"{whose} is at its limit; it starts when other jobs of it end ({limit[0]})"


def _is_about_one_job(limit: re.Match[str]) -> bool:
    """Return whether a limit is for a single job, so that waiting does not help; other limits pass when other jobs
    end."""
    return limit["scope"] == "Min" or "PerJob" in limit["what"] or "PerNode" in limit["what"]
