"""Lower bounds of the step time and of the memory, over all layouts of given degrees."""
