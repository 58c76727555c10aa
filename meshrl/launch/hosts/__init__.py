"""Host that joins a mesh: its join, run, return and leave. Open `host_launcher.py` first."""
