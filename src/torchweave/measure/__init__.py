"""IDEA: measure a pair honestly, over a real or a simulated link. Imports torch."""
