"""Verbs beside training that need torch: evaluate, export and describe a model, and the state of torch."""
