"""Files that survive a crash: durable writes, locks, corruption. Open `disk_sync.py` first."""
