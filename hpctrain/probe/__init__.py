"""Nodes, devices and links into a topology: resident agents, contention-free rounds, timing at the receiver."""
