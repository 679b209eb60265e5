"""Models of topology.json and its parts, the file with the figures of all node pairs, and the time of a message that
follows from them."""
