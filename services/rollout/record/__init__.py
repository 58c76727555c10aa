"""What a shard writes down: tokens by group commit, its ledger, finished groups. Open
`group_commit.py` first."""
