"""Plans for an existing run: after the loss of nodes, with constants fitted to the run's measured steps, or for a
topology with slower nodes or links (what-if).
"""
