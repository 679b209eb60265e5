"""Connections between processes: authentication, messages, and which nodes reach each other."""
