"""Sessions that go on at another engine."""
