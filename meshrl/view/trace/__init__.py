"""`trace.json` of a run for Perfetto, from what its processes have noted and its events. Open
`trace_writer.py` first.
"""
