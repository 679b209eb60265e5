"""Reads a finished corpus for training: token shards, mixtures, samples and the node cache."""
