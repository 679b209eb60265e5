"""Layouts: which devices compute which blocks and micro-batches, and how both are distributed over devices."""
