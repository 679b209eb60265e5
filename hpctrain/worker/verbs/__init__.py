"""Commands of `hpctrain.worker` that answer one request: evaluate, export or describe a model, and tell
which torch a node has and which devices it can use."""
