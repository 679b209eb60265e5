"""Transformers in plain torch, without any parallelism. A pipeline stage is a model with some of its parts absent."""
