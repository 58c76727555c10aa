"""SGLang as an engine: a server in its own interpreter, driven over HTTP. Open `engine.py`
first."""
