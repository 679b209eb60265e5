"""`hpctrain simulate`: predict a step of a plan, or a long run with failures."""
