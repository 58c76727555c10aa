"""What a host as a whole shows to those who operate it. Open `health_endpoint.py` first."""
