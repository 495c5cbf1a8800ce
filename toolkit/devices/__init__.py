"""This machine, and the catalog of GPUs."""
