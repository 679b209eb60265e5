"""Reports as HTML pages, each one file: what a run's files say, as charts, tables and notes."""
