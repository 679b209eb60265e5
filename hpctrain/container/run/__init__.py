"""Commands inside an image: what is bound, how it is entered, and what keeps it mounted."""
