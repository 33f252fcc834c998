"""Where a model's files are: a directory on this machine, or a Hugging Face hub name whose files are fetched into the cache.

In goes what `orchestrator.model.name` holds, out comes a directory. Only the files that are asked for are fetched, so a
tokenizer never costs a download of weights. The cache, the token and offline mode are the hub client's own
(`HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`); where the hub cannot be reached, what the cache holds is used. Reads no file.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Literal

from jaxrl.errors import ModelLoadError

CONFIG_FILE = "config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that make text of token ids and back; generation_config.json holds the stop ids that servers read."""

_PATTERNS = {
    "config": [CONFIG_FILE],
    "tokenizer": [CONFIG_FILE, *TOKENIZER_FILES],
    "weights": [CONFIG_FILE, "model.safetensors.index.json", "model*.safetensors"],
}
_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_ANSWER_DEADLINE_S = 10.0
"""How long the hub may take to answer whether it has the model; one stalled file is given up by the client itself."""

logger = logging.getLogger(__name__)


def resolve_model_directory(name: str | os.PathLike[str], files: Literal["config", "tokenizer", "weights"]) -> Path:
    """Find the directory that a model name stands for, fetching what is missing from the Hugging Face hub.

    Args:
      name: a path, or `org/name` or `org/name@revision` on the hub. What exists on this machine is a path; so is a name
        whose first part is a directory here.
      files: which files will be read; no other is fetched.

    Returns:
      An existing path. It may be a file, or a directory without the files: that is for the reader to say.

    Raises:
      ModelLoadError: `name` is neither; or the hub has no such model, refuses it or cannot be reached, and the cache does
        not hold it.

    Example:
      >>> resolve_model_directory("tests/golden/tokenizer", "tokenizer").name
      'tokenizer'
    """
    path = Path(name)
    try:
        path = path.expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError):  # longer than any name of a file can be; `~` of a user that is not here
        pass
    hub_name = _HUB_NAME.fullmatch(os.fspath(name))
    if hub_name is None or Path(path.parts[0]).is_dir():
        raise ModelLoadError(
            f"`{name}` is not a directory on this machine (seen from {Path.cwd()}), and it is not taken for a name on the Hugging Face "
            "hub, which is `org/name` or `org/name@revision`. Correct the path, make the model (the head of a shipped configuration says "
            "with which command), or name a model of the hub."
        )
    return _fetch(hub_name["repo"], hub_name["revision"], _PATTERNS[files])


def _fetch(repo: str, revision: str | None, patterns: list[str]) -> Path:
    # Where only directories are used, the client and its HTTP library are never loaded.
    from huggingface_hub import HfApi, constants, snapshot_download

    unreachable: Exception | None = None
    try:
        # Asked first because the client itself sets no deadline to this question.
        HfApi().model_info(repo, revision=revision, timeout=_ANSWER_DEADLINE_S)
    except Exception as error:  # the client lets through whatever its HTTP library raises
        unreachable = error
    try:
        directory = snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=unreachable is not None)
    except Exception as error:
        cause = unreachable or error
        at = f" at revision {revision!r}" if revision else ""
        raise ModelLoadError(
            f"`{repo}`{at} is not a directory on this machine (seen from {Path.cwd()}), it could not be fetched from {constants.ENDPOINT} "
            f"({_first_line(cause)}), and the cache {constants.HF_HUB_CACHE} does not hold it. Pass the directory of a model that is "
            f"already here (its {CONFIG_FILE}, safetensors and tokenizer files), or check the name and the network; a private or gated "
            "model needs `HF_TOKEN`, and HF_HUB_OFFLINE=1 forbids fetching."
        ) from cause
    if unreachable is not None and not constants.HF_HUB_OFFLINE:
        logger.warning("the cached copy of %s is used, since %s did not answer: %s", repo, constants.ENDPOINT, _first_line(unreachable))
    return Path(directory)


def _first_line(error: Exception) -> str:
    """The client's messages run over paragraphs; the first says what happened."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
