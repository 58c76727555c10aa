"""Self-reports of a process: logs, counters, metrics, health. Open `metrics_endpoint.py` first."""
