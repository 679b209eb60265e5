"""Side-by-side measurements: ours and another, in turns within one launch, so that the machine's noise is shared."""
