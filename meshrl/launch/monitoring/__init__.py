"""Health and metrics of a host as a whole, for its operators. Open `health_endpoint.py` first."""
