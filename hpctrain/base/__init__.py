"""What every room builds on: errors, units, processes, time, atomic files, packaged data."""
