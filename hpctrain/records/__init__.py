"""Models of hpctrain's own JSON and YAML files, and of their parts: frozen pydantic models. A document has the key
`schema` and is read and written as a whole; in a .jsonl file, each line is such a document."""
