"""The one base class of every configuration section.

Frozen (a resolved run never changes), closed (an unknown key is an error), and documented: each field is followed by a
docstring, which pydantic turns into the field's description. No field is Optional with a default other than None,
because TOML has no null.
"""

from pydantic import BaseModel, ConfigDict

IMPORT_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""`package.module:name` of something of the user's own."""


class Section(BaseModel):
    """A frozen section of the configuration that refuses unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
