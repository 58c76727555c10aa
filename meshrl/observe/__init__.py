"""Observation of a mesh and its jobs: rooms for records, reports, views and how they stand."""
