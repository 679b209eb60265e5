"""topology.json, and what it holds: links, network cards, and the figures of every pair."""
