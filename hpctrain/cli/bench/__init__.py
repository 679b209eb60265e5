"""`hpctrain bench`: one file for each kind of measurement, over the room of that name."""
