"""Views of a mesh and of its runs: one snapshot (`mesh`), what its events tell (`history`), and the
renderers of both: live view, top, metrics, report, trace. Beside them the record of each run.
"""
