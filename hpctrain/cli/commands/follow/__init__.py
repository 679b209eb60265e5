"""Commands that show how runs are doing."""
