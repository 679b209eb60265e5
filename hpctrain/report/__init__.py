"""A run's files turned into what a person reads: report.html, its status, and the live view of the terminal."""
