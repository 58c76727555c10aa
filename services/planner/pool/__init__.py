"""Pool at one snapshot: present workers and hosts, the instances of each job, and the draft of
decisions. Open `draft.py` first.
"""
