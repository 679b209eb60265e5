"""The views of `hpctrain watch`: a run and a sweep drawn on a terminal, and what changed as lines or JSON."""
