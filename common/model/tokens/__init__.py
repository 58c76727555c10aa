"""Tokenizers and vocabularies. Open `tokenizer.py` first."""
