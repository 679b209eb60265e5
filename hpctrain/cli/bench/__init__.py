"""`hpctrain bench`: the commands and their tables; hpctrain/bench does the measuring."""
