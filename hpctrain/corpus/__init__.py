"""Turns text into token shards (`data prepare`), and reads shards as an endless shuffled stream of training
sequences."""
