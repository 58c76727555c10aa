"""The planner's allocation."""
