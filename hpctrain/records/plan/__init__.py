"""plan.json, and what it holds: schedule, compression, and the profile of measured steps."""
