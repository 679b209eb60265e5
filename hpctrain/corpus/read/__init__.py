"""Reads a finished corpus for training: token shards, mixtures of corpora, model inputs and targets, and the node
cache."""
