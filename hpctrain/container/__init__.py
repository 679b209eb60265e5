"""Entering an image: which program does it, what of the machine is seen inside, and with which environment."""
