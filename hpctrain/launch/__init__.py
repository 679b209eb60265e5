"""From a run file to its node processes: checks, job script, submission, and local processes."""
