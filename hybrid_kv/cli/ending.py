"""Exit of a verb that the user has ended."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it."""

ENDED = "interrupted"
"""All that is said where nothing has been begun."""
