"""What a process reports of itself: logs, counters, metrics, health. Open `endpoint.py` first."""
