"""The weight store as its clients see it. Open `weight_store_client.py` first."""
