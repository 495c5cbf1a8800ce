"""Units, errors, display, redaction, cache, phases, atomic files, process lifecycle."""
