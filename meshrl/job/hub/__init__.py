"""Models and datasets of the Hugging Face Hub."""
