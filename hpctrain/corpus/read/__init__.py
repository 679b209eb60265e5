"""A finished corpus as training reads it: token shards, mixtures, samples and the node cache."""
