"""Sets up torch's parallel modules as a plan says: mesh, tensor, pipeline and data parallelism."""
