"""One agent a node: it starts and watches the node's workers, and agrees with the other agents on generations."""
