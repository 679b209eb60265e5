"""The training state in shared memory: the format of a rank's segment, the update that can be finished by another
process, the choice of the segments to restart from, and the restart."""
