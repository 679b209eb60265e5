"""`hpctrain bench`: one file for each kind of measurement; hpctrain/bench does the measuring."""
