"""Turns text into token shards, and reads shards as an endless shuffled stream of training sequences."""
