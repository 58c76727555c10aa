"""Sandbox program, which runs a job's tools and rewards in isolation. Open `actor.py` first."""
