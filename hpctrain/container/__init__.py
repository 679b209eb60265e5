"""Images for a cluster: built, checked, and entered by the commands of a run."""
