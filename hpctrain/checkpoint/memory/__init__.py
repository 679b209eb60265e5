"""The training state in memory: the format of a rank's segment, the optimizer's update that another process can finish,
snapshots, the choice of the segments from which a generation starts, and how their state is loaded."""
