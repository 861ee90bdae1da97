"""Mutants: copies of the package with one deliberate defect, which named tests must find.

`python -m tests.mutants` runs them, see `__main__`. `change` applies a defect, `run` runs the tests
of one mutant, and `listed` has the list. A feature adds the mutants that its tests kill.
"""
