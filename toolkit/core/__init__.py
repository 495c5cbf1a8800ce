"""Units, errors, display, redaction, cache, phases, atomic files, process lifecycle."""

VERSION = "0.1.0"
"""As in pyproject.toml."""
