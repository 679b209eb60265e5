"""Commands. Each is a function `<name>_command`; commands of one subject share a file."""
