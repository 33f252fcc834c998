"""The tokenizer's side of a model directory: loading tokenizer.json, and the ids that its files say end a reply."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a directory.

    Raises:
      ModelLoadError: there is none, or it is damaged.
    """
    if not (path / "tokenizer.json").is_file():
        raise ModelLoadError(f"{path}: expected a Hugging Face directory with a tokenizer.json, found none; pass the model's directory")
    # Without torch, importing transformers logs that no model is available: true, and no concern of someone who wants a
    # tokenizer.
    logging.getLogger("transformers").addFilter(_is_of_concern)
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:  # the Rust library raises bare `Exception` for a damaged file
        raise ModelLoadError(f"{path}: the tokenizer cannot be loaded: {type(error).__name__}: {error}") from error


def eos_ids(path: Path, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Return the eos ids that generation_config.json and the tokenizer name, where they do; what can be no id is left out."""
    eos = _read_json(path / "generation_config.json").get("eos_token_id")
    named = [*eos] if isinstance(eos, list) else [eos]
    return {token_id for token_id in (*named, tokenizer.eos_token_id) if type(token_id) is int and 0 <= token_id < 2**31}


def check_vocabulary(path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Refuse a tokenizer with more ids than the model has rows: some token has no embedding.

    Raises:
      ModelLoadError: it has.
    """
    num_rows = _read_json(path / "config.json").get("vocab_size")
    if isinstance(num_rows, int) and len(tokenizer) > num_rows:
        beyond = sorted(token for token, token_id in tokenizer.get_vocab().items() if token_id >= num_rows)
        raise ModelLoadError(
            f"{path}: the tokenizer has {len(tokenizer)} ids but config.json says `vocab_size`={num_rows}; the model has no embedding for "
            f"{beyond[:5]}: take the tokenizer and the weights from one model, or correct the special tokens in tokenizer_config.json"
        )


def _is_of_concern(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("PyTorch was not found")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value
