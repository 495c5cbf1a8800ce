"""Units, errors, display, redaction, files that a kill leaves whole: what everything else stands on."""
