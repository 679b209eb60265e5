"""The command line. `commands` and `bench` hold the commands; a command reads files, calls another room, and writes or
prints the result."""
