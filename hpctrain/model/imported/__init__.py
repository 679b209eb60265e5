"""Models from the user's own code: loading, checking, measuring and cutting them, and reporting their errors."""
