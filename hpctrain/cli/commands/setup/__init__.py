"""Commands before a run: check the machine, build images, prepare data, write the run file, start a lab, and show a
demo."""
