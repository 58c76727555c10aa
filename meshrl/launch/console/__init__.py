"""Logs of a host on the standard output of its root process. Open `log_printer.py` first."""
