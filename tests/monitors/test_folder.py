"""`jaxrl.monitors.folder`: whether a folder may be used, and what the refusal proposes."""

from pathlib import Path

import pytest

from jaxrl.errors import ConfigError
from jaxrl.monitors.folder import check_run_folder


@pytest.mark.parametrize(("has_checkpoint", "proposed"), [(True, "go on with it"), (False, "no step of it is saved, so delete it")])
def test_a_folder_that_holds_a_run_is_refused_and_resuming_is_proposed_only_where_it_can_be(
    tmp_path: Path, has_checkpoint: bool, proposed: str
) -> None:
    def check(*, resume: bool) -> None:
        check_run_folder(tmp_path, resume=resume, has_checkpoint=lambda: has_checkpoint)

    (tmp_path / "metrics.jsonl").touch()
    check(resume=False)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    check(resume=True)
    with pytest.raises(ConfigError, match=f"holds a run already; {proposed}") as caught:
        check(resume=False)
    assert ("--resume" in str(caught.value)) is has_checkpoint
