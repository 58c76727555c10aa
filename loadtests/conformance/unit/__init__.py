"""A module of a project, and its unit tests for pytest or unittest."""
