"""Shapes of models: config.json and its architectures. Open `config.py` first."""
