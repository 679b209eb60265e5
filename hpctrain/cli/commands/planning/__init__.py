"""Commands that measure nodes and make plans."""
