"""Gangs of mixed generations, on paced ranks: real gradients, each task padded to the time of a
declared accelerator. Open `__main__.py` first.
"""
