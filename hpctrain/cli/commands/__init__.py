"""The commands of `hpctrain`. The function `NAME_command` is the command NAME; commands of one subject share a file."""
