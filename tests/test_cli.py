"""`jaxrl VERB`: dispatch, help, and the nearest verb."""

import importlib.util

import pytest

from jaxrl.cli import VERBS, main


def test_every_verb_has_an_entry_point() -> None:
    for verb in VERBS:
        assert importlib.util.find_spec(f"jaxrl.{verb}") is not None


def test_an_unknown_verb_ends_with_code_2_and_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "--config", "x"]) == 2
    assert capsys.readouterr().err == "jaxrl: unknown verb 'trian'; did you mean `jaxrl train`?\n"
    assert main(["xyzzy"]) == 2
    assert f"the verbs are {', '.join(VERBS)}." in capsys.readouterr().err


def test_help_lists_the_verbs_and_no_verb_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == shown.err
    assert all(f"\n  {verb} " in shown.out for verb in VERBS)


def test_a_verb_gets_the_rest_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    assert "python -m jaxrl.train" in capsys.readouterr().out
