"""The `hybrid-kv` command: one module per verb; heavy packages are imported when a verb runs."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it."""

ENDED = "interrupted"
"""All that is said where nothing has been begun."""
