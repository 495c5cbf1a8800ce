"""Set-up, loading, preparation, the loop, evaluation, resumption: what a rank does."""
