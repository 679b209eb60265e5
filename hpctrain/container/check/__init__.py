"""Check an image from outside and from inside."""
