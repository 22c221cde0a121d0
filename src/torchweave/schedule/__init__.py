"""IDEA: a schedule is data: tuples of actions, one tuple a rank, made by pure functions. Standard library only."""
