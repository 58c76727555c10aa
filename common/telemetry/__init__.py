"""What a process reports of itself: logs, counters, metrics, health. Open `monitor.py` first."""
