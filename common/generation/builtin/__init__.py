"""The built-in engine: who has which slot and block, and what runs next. Open `engine.py` first."""
