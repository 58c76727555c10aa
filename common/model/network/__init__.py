"""Parts of the decoder. Open `decoder.py` first."""
