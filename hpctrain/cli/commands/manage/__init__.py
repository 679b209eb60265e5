"""Commands that act on runs: cancel one, run a command beside it, remove old ones."""
