"""One diagnosis, several looks."""
