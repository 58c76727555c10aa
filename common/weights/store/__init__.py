"""Client side of the weight store. Open `weight_store_client.py` first."""
