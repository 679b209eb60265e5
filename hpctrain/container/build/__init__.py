"""Building images for a cluster: their definitions, and the build itself."""
