"""Plans for a run that exists: without lost nodes, by its own measured steps, or under other figures."""
