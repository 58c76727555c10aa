"""Chunks in files, by digest. Open `chunk_store.py` first."""
