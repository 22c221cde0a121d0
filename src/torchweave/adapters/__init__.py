"""IDEA: bind a framework to weave. One file each, imported late."""
