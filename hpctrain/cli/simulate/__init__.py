"""`hpctrain simulate`: the step of a plan, and a long run with failures."""
