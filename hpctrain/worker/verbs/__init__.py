"""Commands of `hpctrain.worker` that answer one request: evaluate, export or describe a model, and print the state
of torch."""
