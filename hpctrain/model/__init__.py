"""Transformers in plain torch, without any parallelism: a stage is a model with some of its parts absent."""
