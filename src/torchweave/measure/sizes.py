"""IDEA: what the command line and the models both know, without torch."""

from __future__ import annotations

# a mixture of experts with a fixed capacity; one that drops no token; dense with tensor parallelism; dense and alone
CHUNKS = ("moe", "dropless", "dense", "alone")
HEAD = 64  # width of an attention head
