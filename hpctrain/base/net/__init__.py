"""Connections between processes: authentication, messages, the kernel's counters of TCP connections, and the choice of
nodes to leave out when some pairs of nodes do not reach each other."""
