"""Models of topology.json and its parts, the pair matrix of a large cluster, and the time of a message between two
nodes by the figures of a topology."""
