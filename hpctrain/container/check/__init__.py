"""What is wrong with an image, found from outside and from within."""
