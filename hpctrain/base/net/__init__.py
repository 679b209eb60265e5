"""Connections between processes: authentication, messages, and the choice of nodes to leave out when some pairs of
nodes do not reach each other."""
