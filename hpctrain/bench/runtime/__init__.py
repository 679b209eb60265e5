"""Training speed compared with torch's own parallel wrappers."""
