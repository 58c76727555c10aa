"""The plugins that run the tests."""
