"""Run commands inside an image: binds, argv and environment, and keeping the image mounted."""
