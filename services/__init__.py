"""The programs of a mesh, each a package; none imports another."""
