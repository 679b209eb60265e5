"""One file a command: its options, and calls to the rooms below."""
