"""The choice of codecs once a layout is found: for gradients, and for messages between stages."""
