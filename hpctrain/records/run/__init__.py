"""Pydantic models of run.yaml and site.yaml. Large sections of run.yaml have a module each; `run` has all others."""
