"""The strictly on-policy mesh beside a synchronous loop. Open `__main__.py`."""
