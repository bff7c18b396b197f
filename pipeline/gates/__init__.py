"""Cheap proofs before money is spent: what a gate measures on the ranks, and how it judges."""
