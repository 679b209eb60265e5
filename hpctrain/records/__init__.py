"""The files that the rooms exchange: frozen models with `schema`, read and written whole."""
