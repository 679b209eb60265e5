"""A finished corpus as training reads it: token shards, mixtures, samples and the copies that a node keeps."""
