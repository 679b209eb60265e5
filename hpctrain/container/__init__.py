"""Images for a cluster: built, checked, and started by the commands of a run."""
