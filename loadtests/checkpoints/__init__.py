"""Random checkpoints as `transformers` writes them, and what is changed in them."""
