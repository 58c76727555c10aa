"""The pool at one look: who is there, the residents of each job, and the draft that decisions are
made on. Open `draft.py` first.
"""
