"""Plans for an existing run: after the loss of nodes, calibrated by measured steps, or with changed figures."""
