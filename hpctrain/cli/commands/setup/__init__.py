"""Commands before a run: the machine, images, data, the run file, a lab, and a demonstration of all of it."""
