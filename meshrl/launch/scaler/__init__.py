"""Requests to the provider of spot hosts. Open `spot_scaler.py` first."""
