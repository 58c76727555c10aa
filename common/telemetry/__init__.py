"""What a process tells of itself: logs, counters, metrics, its health. Open `monitor.py` first."""
