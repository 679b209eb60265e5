"""Models of all files that hpctrain reads and writes: frozen pydantic models, each with a `schema`, read and written as
a whole."""
