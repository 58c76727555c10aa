"""Checks of a job file's content, each of which names the line of the wrong key."""
