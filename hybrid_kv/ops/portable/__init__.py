"""What the native engine does, in numba and torch: for machines without it, and to check it."""
