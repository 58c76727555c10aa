"""Measurements of an engine: speed by batch and context, the curve of a step, pauses. Open
`throughput.py` first.
"""
