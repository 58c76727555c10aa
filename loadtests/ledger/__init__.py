"""A rollout shard's ledger under load. Open `shard.py` first."""
