"""What is seen of a running cache: where its time goes, and what its approximation misses."""
