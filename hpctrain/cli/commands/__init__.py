"""One file for each command: its options, and calls into the other packages."""
