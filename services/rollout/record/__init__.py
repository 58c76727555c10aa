"""Records of a shard: tokens by group commit, its ledger, its finished groups. Open
`group_commit.py` first.
"""
