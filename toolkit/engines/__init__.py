"""One file or folder for each engine, a subclass of `base.Engine`. Only engines know upstream's names."""
