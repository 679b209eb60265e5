"""Wiring of torch's own parallel pieces by a plan: mesh, tensor, pipeline and data parallel."""
