"""run.yaml, section by section, and site.yaml."""
