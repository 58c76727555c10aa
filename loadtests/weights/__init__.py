"""Weight versions from who publishes them to the tensors of who receives them, measured. Open
`__main__.py` first; the processes are those of `members/`, put together by `scene.py`.
"""
