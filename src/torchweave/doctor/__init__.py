"""IDEA: what decides about overlap on this machine: facts first, then the judgement."""
