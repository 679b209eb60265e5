"""The devices and links that a plan may use, and their tensor-parallel groups."""
