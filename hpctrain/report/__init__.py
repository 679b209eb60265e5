"""Show a run's files to people: report.html, the run's status, and the live view on the terminal."""
