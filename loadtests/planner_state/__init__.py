"""The planner's load on Redis."""
