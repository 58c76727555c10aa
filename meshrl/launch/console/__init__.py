"""The logs of a host on the standard output of its root process. Open `console.py` first."""
