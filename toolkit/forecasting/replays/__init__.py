"""How each engine's bytes move through a step: one file an engine, all with the same functions: `heeds`, `replay`, `gathering`."""
