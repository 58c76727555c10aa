"""Checkpoints as Hugging Face's tools read them. Open `hf.py` first."""
