"""The files that rooms exchange: frozen models with `schema`, read and written as a whole."""
