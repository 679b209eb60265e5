"""The cost model compared with published runs, and its constants fitted to them."""
