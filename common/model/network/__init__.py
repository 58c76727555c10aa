"""The decoder, part by part. Open `decoder.py` first."""
