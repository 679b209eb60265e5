"""Training speed beside torch's own parallel wrappers."""
