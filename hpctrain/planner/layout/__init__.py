"""A layout: which devices compute which blocks of which micro-batches, and how both are shared out."""
