"""The weight store as its clients see it. Open `weight_store.py` first."""
