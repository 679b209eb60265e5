"""Models of run.yaml, a module for each section, and of site.yaml."""
