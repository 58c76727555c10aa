"""Checks of what a job file says, each of which names the line of the key that is wrong."""
