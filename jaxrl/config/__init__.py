"""What a run is, as frozen pydantic sections. Imports nothing heavy; reading files and the command line is `config.load`'s work."""

from jaxrl.config.run import RunConfig

__all__ = ["RunConfig"]
