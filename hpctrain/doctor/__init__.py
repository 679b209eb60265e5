"""`hpctrain doctor`: collects facts about a machine and its cluster, and decides what they mean for a run."""
