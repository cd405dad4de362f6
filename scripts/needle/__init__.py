"""Training of the small model that ships with the package; run `scripts/train_needle`."""
