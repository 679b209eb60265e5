"""The probe's processes: a member on each node, one of which also runs the coordinator, and the messages between
them."""
