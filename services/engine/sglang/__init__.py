"""SGLang as an engine: a server in its own interpreter, controlled over HTTP. Open `engine.py`
first.
"""
