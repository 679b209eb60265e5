"""Options and warnings that several commands share."""
