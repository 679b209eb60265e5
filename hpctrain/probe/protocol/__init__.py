"""The probe's processes: one coordinator, a member on each node, and the connections and messages between them."""
