"""What every room stands on: errors, units, processes, time, atomic files, packaged data."""
