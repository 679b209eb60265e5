"""The run folder: its layout, the check that nobody else can write to it, its lookup by name, its copy of your code,
secrets, notifications and pruning."""
