"""The tree of connections that agents of many nodes keep instead of a connection for each pair."""
