"""What several commands print, and how a terminal shows it."""
