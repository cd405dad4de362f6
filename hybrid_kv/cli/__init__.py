"""The `hybrid-kv` command: one module per verb; heavy packages are imported when a verb runs."""
