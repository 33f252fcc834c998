"""What a run is, as frozen pydantic sections.

Imports nothing heavy, and reads no file and no command line: that is `config.load`'s work.
"""

from jaxrl.config.run import RunConfig

__all__ = ["RunConfig"]
