"""Text as people have it, compressed, in archives or in tables, read as documents in units of work."""
