"""What load tests measure with: meters of CPU time, small meshes, other generators. Open
`metered.py` first."""
