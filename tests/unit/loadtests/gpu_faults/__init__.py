"""Parts whose cases fail in every way, for the runner of `loadtests.gpu`."""
