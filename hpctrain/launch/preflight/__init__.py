"""Reads, completes and checks the inputs of a run before anything starts: run file, data, model, topology, plan and
site."""
