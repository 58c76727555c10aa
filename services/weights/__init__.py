"""The weight store: versions, checkpoints and finished groups. Open `store.py` first."""
