"""Tests of commands on an existing run."""
