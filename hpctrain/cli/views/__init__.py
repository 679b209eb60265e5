"""What several commands print: the status of runs, the reasons of a plan, the checks before a job is queued; and the
console."""
