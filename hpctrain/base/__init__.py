"""What every other package of hpctrain builds on: errors, units, processes, time, atomic files, packaged data."""
