"""Worlds to play in. `envs.build` turns a config into an environment; adapters do not import one another."""
