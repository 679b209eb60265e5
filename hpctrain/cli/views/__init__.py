"""Output that several commands share, and how a terminal shows it."""
