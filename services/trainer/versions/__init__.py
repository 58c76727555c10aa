"""What a core makes durable: versions and checkpoints. Open `publishing.py` first."""
