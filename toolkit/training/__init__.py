"""The work of a rank: set-up, loading, preparation, the loop, evaluation, resumption."""
