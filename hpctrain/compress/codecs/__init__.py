"""Packs numbers into messages: integers with scales, selected numbers with their positions, and count sketches."""
