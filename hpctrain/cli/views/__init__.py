"""What commands print on a terminal: a console that escapes control characters, progress, and the reasons of a plan."""
