"""What only developers run: scripts that set up a machine, and simulations of what no test machine has."""
