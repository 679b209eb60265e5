"""Starts runs: checks the run file, writes and submits the job script, or starts local processes. Also starts probes,
and evaluates and exports checkpoints."""
