"""Durable files that come back wrong: `files` says which there are, `harms` what happens to one,
`trials` what a run makes of it. Start with `__main__`.
"""
