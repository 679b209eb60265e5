"""Other tools' topology files, one format per module; text in, text out."""
