"""Models of topology.json and its parts: links, network cards, and the figures of every pair."""
