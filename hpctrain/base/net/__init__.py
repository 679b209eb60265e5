"""Connections between processes: who may connect, what a message is, and who hears whom."""
