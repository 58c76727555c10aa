"""`trace.json` of a run for Perfetto, from its processes' notes and its events. Open
`trace_writer.py` first.
"""
