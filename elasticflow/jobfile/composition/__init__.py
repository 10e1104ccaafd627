"""One file, several jobs: the matrix, and references to what lies outside."""
