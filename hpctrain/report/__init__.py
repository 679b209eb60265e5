"""A run's files presented to people: report.html, the run's status, and the live view on the terminal."""
