"""Every configuration that the project ships loads, and every setting says what it is for."""

from pathlib import Path

import pytest

from jaxrl.config.base import Section
from jaxrl.config.dump import dump_toml
from jaxrl.config.load import load_config
from jaxrl.config.run import RunConfig
from jaxrl.config.serve import ServeConfig

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))


def all_sections(base: type[Section] = Section) -> list[type[Section]]:
    return [section for child in base.__subclasses__() for section in (child, *all_sections(child))]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_configuration_loads_and_its_dump_loads_equal(path: Path, tmp_path: Path) -> None:
    root = ServeConfig if path.name.startswith("serve_") else RunConfig
    config = load_config(path, (), root)
    (tmp_path / "config.toml").write_text(dump_toml(config), encoding="utf-8")
    assert load_config(tmp_path / "config.toml", (), root) == config


@pytest.mark.parametrize("section", all_sections(), ids=lambda section: section.__name__)
def test_every_section_and_every_field_is_documented(section: type[Section]) -> None:
    assert section.__doc__, section
    undocumented = [name for name, field in section.model_fields.items() if not (field.description or "").strip()]
    assert undocumented == []


@pytest.mark.parametrize("section", all_sections(), ids=lambda section: section.__name__)
def test_no_optional_field_has_a_default_other_than_null(section: type[Section]) -> None:
    """TOML has no null, so such a field could be set to null by no file, and a dump would not read back."""
    for name, field in section.model_fields.items():
        if not field.is_required() and type(None) in getattr(field.annotation, "__args__", ()):
            assert field.get_default(call_default_factory=True) is None, f"{section.__name__}.{name}"
