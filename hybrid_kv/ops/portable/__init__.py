"""Twin of the native engine in numba and torch: for machines without it, and to check it."""
