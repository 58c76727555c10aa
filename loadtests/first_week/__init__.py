"""First GRPO curve of a model and a dataset of the Hub, from nothing."""
