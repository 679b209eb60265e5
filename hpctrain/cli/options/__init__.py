"""Options that several commands share, and functions that read the options' values."""
