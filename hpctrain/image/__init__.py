"""Images for a cluster: their definitions, how they are built, and what is wrong with one."""
