"""One file for each command: its options, and calls to the rooms below."""
