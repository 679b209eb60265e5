"""The selfcheck: every path of the devices and of the training code, run once on a machine or on the nodes of a job."""
