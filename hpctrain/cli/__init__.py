"""The command line: one short file a verb. Each reads files, calls one function, writes one file."""
