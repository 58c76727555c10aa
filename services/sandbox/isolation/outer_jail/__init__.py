"""Outer jail around a zygote, and the interpreter in it. Open `launcher.py` first."""
