"""Plans for an existing run: without lost nodes, calibrated by measured steps, or with changed figures."""
