"""Checkpoints as Hugging Face's tools read them. Open `hf_writer.py` first."""
