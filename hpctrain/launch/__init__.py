"""Start a run: from a run file over checks, job script and submission to its node processes."""
