"""Views of a mesh and of its runs: one snapshot (`mesh`), the history of its events (`history`),
and their renderers.

The renderers are live view, top, metrics, report and trace. Beside them is the record of each run.
"""
