"""A host that joins a mesh: how it joins, runs, comes back and leaves. Open `host_launcher.py`
first.
"""
