"""Layouts: which devices compute which blocks of which micro-batches, and how both are distributed."""
