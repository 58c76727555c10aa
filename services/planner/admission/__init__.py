"""Which jobs run, with how many workers each, and on which hosts their services may be."""
