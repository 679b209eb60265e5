"""Models from the user's code: loads, checks, measures and cuts them, and reports their errors."""
