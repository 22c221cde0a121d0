"""From facts to causes: which work should have run together, how much of it did, and what kept the rest apart."""
