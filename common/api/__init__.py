"""Interfaces of all services: message types and method tables, no logic. Open `engine.py` first."""
