"""A model of the person's own code: found, measured, cut into parts, and its errors told in its own words."""
