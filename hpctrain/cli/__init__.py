"""The command line: one short file for each command, which reads files, calls one function and writes one file."""
