"""How every file is read and written: frozen models, YAML, JSON, JSON lines, bounds, and errors with their line."""
