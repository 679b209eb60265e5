"""Input files of text, compressed, in archives or in tables, read as documents in work units."""
