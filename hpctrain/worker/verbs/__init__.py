"""Verbs besides training that need torch: evaluate, export and describe a model, and print the state of torch."""
