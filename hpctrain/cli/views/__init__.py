"""What several commands print, and where a terminal shows it."""
