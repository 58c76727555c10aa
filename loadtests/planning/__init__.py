"""The planner's decisions."""
