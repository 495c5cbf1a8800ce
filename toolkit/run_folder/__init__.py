"""A run's folder: paths, events, lock, heartbeat."""
