"""IDEA: watch a program run: a profiler's trace, and beside it what the trace cannot hold. Imports torch late."""
