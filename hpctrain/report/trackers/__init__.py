"""Tools that groups of researchers keep their experiments in (trackers), and how a run's figures get into them."""
