"""Versions as tensors in chunks: manifests and their identity. Open `manifest.py` first."""
