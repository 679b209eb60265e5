"""How numbers are packed: integers, values, indices, sketches."""
