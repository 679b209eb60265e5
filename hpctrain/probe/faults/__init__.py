"""What is wrong with a node, a device or a link, judged from what was measured."""
