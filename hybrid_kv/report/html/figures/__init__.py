"""From values to scenes: every figure is a pure function."""
