"""TOML files: read with the line of each key, and written."""
