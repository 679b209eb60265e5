"""Images for a cluster: their definitions, and how they are built."""
