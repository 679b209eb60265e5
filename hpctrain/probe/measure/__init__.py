"""What one pair or one device is measured by, and the figures that come of it."""
