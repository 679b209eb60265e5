"""What a person sees of a run: report.html, the run's status, its merged logs, and the live views on the terminal."""
