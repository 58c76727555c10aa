"""Benchmark of weight versions from publishers to the tensors of receivers. Open `__main__.py`
first; the processes are those of `members/`, put together by `scene.py`.
"""
