"""Transformers in plain torch. No word of parallelism here: a stage is a model with some of its parts absent."""
