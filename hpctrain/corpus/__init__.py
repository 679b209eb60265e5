"""Text to token shards, and the endless shuffled stream of training sequences."""
