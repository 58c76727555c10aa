"""Files that survive a crash: durable writes, locks, damage. Open `disk_sync.py` first."""
