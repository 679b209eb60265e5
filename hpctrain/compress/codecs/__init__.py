"""Packs numbers into messages: integers, values, indices, sketches."""
