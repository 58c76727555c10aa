"""What a process reports of itself: logs, counters, metrics, health. Open `metrics_endpoint.py`
first.
"""
