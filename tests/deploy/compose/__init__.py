"""compose/ as users run it, on an engine; `make test-compose`."""
