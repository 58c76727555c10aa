"""Engines without a model, for the simulator and for load tests."""
