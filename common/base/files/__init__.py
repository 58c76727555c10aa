"""Files that survive a crash: durable writes, locks, damage. Open `durable.py` first."""
