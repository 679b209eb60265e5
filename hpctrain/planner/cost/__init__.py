"""How long a stage computes and sends, and how much memory it takes."""
