"""Tests of compose/ on a container engine, as users run it; `make test-compose`."""
