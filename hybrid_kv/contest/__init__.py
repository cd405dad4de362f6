"""Methods against each other: the same prompts, the same prefill, one budget, counted costs."""
