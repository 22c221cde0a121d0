"""IDEA: two strands at once. Imports torch."""
