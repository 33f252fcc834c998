"""Checks that look at files and settings only, each on a run that is well and on ones that are not."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl.doctor.finding import Level
from jaxrl.doctor.model import check_head, check_model
from jaxrl.doctor.settings import check_budgets
from jaxrl.doctor.template import check_template
from jaxrl.doctor.tokenizer import check_tokenizer
from jaxrl.errors import ModelLoadError
from tests.doctor.patients import ModelDir, examine

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BOS = "{{- '<|endoftext|>' -}}"


def with_bos(model_dir: ModelDir) -> None:
    """Make the model one whose prompts begin with a token of their own."""
    model_dir.edit_json("tokenizer_config.json", bos_token="<|endoftext|>")


def test_a_template_that_writes_bos_once_is_good_and_twice_is_not(model_dir: ModelDir) -> None:
    with_bos(model_dir)
    model_dir.edit_template(before=BOS)
    once = examine(check_tokenizer, model_dir.override)
    assert once.level is Level.GOOD and "BOS '<|endoftext|>' (0) at the start" in once.text
    assert examine(check_template, model_dir.override).level is Level.GOOD
    model_dir.edit_template(before=BOS)
    twice = examine(check_template, model_dir.override)
    assert twice.level is Level.BAD and "a prompt begins with BOS twice" in twice.text


def test_a_bos_that_only_the_tokenizer_writes_is_told(model_dir: ModelDir) -> None:
    with_bos(model_dir)
    unused = examine(check_tokenizer, model_dir.override)
    assert unused.level is Level.GOOD and "(0) not at the start" in unused.text
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    processor = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}
    model_dir.edit_json("tokenizer.json", post_processor=processor)
    missing = examine(check_template, model_dir.override)
    assert missing.level is Level.WARNING and "puts BOS before bare text and the chat template does not" in missing.text


def test_an_end_that_is_no_token_and_an_end_that_servers_do_not_know_are_told(model_dir: ModelDir) -> None:
    model_dir.edit_json("generation_config.json", eos_token_id=[2, 700])
    beyond = examine(check_tokenizer, model_dir.override)
    assert beyond.level is Level.BAD and "generation_config.json ends replies at [700]" in beyond.text
    model_dir.edit_json("generation_config.json", eos_token_id=0)
    model_dir.edit_json("tokenizer_config.json", eos_token="<|endoftext|>")
    unknown = examine(check_tokenizer, model_dir.override)
    assert unknown.level is Level.WARNING and "only the template ends a turn with [2]" in unknown.text


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_or_without_a_template_is_found(model_dir: ModelDir) -> None:
    model_dir.edit_json("config.json", vocab_size=100)
    with pytest.raises(ModelLoadError, match=r"385 ids but config.json says `vocab_size`=100"):
        examine(check_tokenizer, model_dir.override)
    (model_dir.path / "chat_template.jinja").unlink()
    with pytest.raises(ModelLoadError, match="chat template"):
        examine(check_tokenizer, model_dir.override)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--inference.max_model_len=10", "--orchestrator.sampling.max_tokens=4"), "prompts do not fit; raise `inference.max_model_len`"),
        (("--inference.max_model_len=40",), "replies will be cut at the window"),
        (("--trainer.row_length=40", "--inference.max_model_len=64"), "long rollouts will be dropped; raise `trainer.row_length`"),
    ],
)
@pytest.mark.filterwarnings("ignore:`inference.max_model_len`=64 is longer than `trainer.row_length`:UserWarning")
def test_budgets_that_do_not_hold_a_rollout_are_found_with_the_number_to_set(overrides: tuple[str, ...], said: str) -> None:
    finding = examine(check_budgets, *overrides)
    assert not finding.is_good
    assert said in finding.text


def test_a_tied_head_may_be_in_the_files_only_as_a_copy(model_dir: ModelDir) -> None:
    embedding = model_dir.tensors()[EMBEDDING]
    model_dir.edit_tensors(**{HEAD: embedding})
    copy = examine(check_head, model_dir.override)
    assert copy.level is Level.GOOD and "the files also hold `lm_head.weight`" in copy.text
    other = embedding.copy()
    other[-1, -1] += 1
    model_dir.edit_tensors(**{HEAD: other})
    stale = examine(check_head, model_dir.override)
    assert stale.level is Level.BAD and "`tie_word_embeddings`=true, but the files hold a `lm_head.weight` with other values" in stale.text


def test_an_untied_head_must_be_in_the_files_and_should_not_be_the_embedding(model_dir: ModelDir) -> None:
    model_dir.edit_json("config.json", tie_word_embeddings=False)
    missing = examine(check_head, model_dir.override)
    assert missing.level is Level.BAD and "the files hold no `lm_head.weight`" in missing.text
    embedding = model_dir.tensors()[EMBEDDING]
    model_dir.edit_tensors(**{HEAD: embedding})
    copy = examine(check_head, model_dir.override)
    assert copy.level is Level.WARNING and "untied, but `lm_head.weight` equals" in copy.text
    model_dir.edit_tensors(**{HEAD: embedding + np.float32(1)})
    assert examine(check_head, model_dir.override).level is Level.GOOD


def test_stops_that_are_no_ids_are_told_and_a_template_that_renders_nothing_is_refused(model_dir: ModelDir) -> None:
    model_dir.edit_json("generation_config.json", eos_token_id=[2, -1, 2**40, "2"])
    odd = examine(check_tokenizer, model_dir.override)
    assert odd.level is Level.BAD and "generation_config.json ends replies at [-1, 1099511627776, '2']" in odd.text
    model_dir.edit_template(before="{{ 1/0 }}")
    with pytest.raises(ModelLoadError, match=r"cannot render a question and an answer.*division by zero"):
        examine(check_template, model_dir.override)


def test_a_padded_vocabulary_is_good(model_dir: ModelDir) -> None:
    tensors = model_dir.tensors()
    model_dir.edit_tensors(**{EMBEDDING: np.pad(tensors[EMBEDDING], ((0, 1000), (0, 0)))})
    model_dir.edit_json("config.json", vocab_size=1512)
    assert examine(check_tokenizer, model_dir.override).level is Level.GOOD
    assert examine(check_model, model_dir.override).level is Level.GOOD


def test_weights_that_are_not_numbers_are_found(model_dir: ModelDir) -> None:
    norm = model_dir.tensors()["model.norm.weight"]
    norm[3] = np.nan
    model_dir.edit_tensors(**{"model.norm.weight": norm})
    finding = examine(check_model, model_dir.override)
    assert finding.level is Level.BAD and "not every number of final_norm/scale is finite" in finding.text


def test_a_head_is_looked_for_where_the_loader_reads(model_dir: ModelDir) -> None:
    (model_dir.path / "model-00001-of-00002.safetensors").write_bytes((model_dir.path / "model.safetensors").read_bytes())
    model_dir.edit_tensors(**{HEAD: model_dir.tensors()[EMBEDDING] + np.float32(1)})
    (model_dir.path / "model.safetensors").rename(model_dir.path / "stale.safetensors")
    (model_dir.path / "model-00001-of-00002.safetensors").rename(model_dir.path / "model.safetensors")
    assert examine(check_head, model_dir.override).text.endswith("the files hold no other")
