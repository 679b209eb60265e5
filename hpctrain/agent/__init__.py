"""The agent: one process on each node, which starts and watches the node's workers, and agrees with the other agents
on generations."""
