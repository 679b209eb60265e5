"""What is wrong with an image, checked from outside and from inside."""
