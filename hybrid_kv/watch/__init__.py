"""Observation of a running cache: its time by phase, and what its approximation misses."""
