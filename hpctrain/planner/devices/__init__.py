"""The devices and links that a plan may use, grouped as tensor parallelism needs them."""
