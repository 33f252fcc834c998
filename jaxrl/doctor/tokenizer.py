"""The check of the tokenizer: where prompts begin, where replies end, and that every id has a row in the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, verdict

QUESTION = {"role": "user", "content": "What is 2 + 3?"}


def check_tokenizer(exam: Examination) -> Finding:
    """A prompt begins with the model's first token once, and replies end at ids that the model can sample."""
    from jaxrl.models import load_spec

    renderer, tokenizer = exam.renderer, exam.tokenizer
    prompt_ids = renderer.open_turn(None, [QUESTION]).prompt_ids.tolist()
    num_rows = load_spec(exam.model_name).vocab_size
    problems: list[str] = []
    remarks: list[str] = []

    bos_id, eos_id = (token_id if isinstance(token_id, int) else None for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    bos = "no BOS token" if bos_id is None else f"BOS {renderer.decode([bos_id])!r} ({bos_id})"
    if bos_id is not None and prompt_ids[:1] == [bos_id]:
        bos += " at the start"
    elif bos_id is not None:
        bos += " not at the start"

    named = {"generation_config.json": _generation_eos(exam.directory), "the tokenizer": [] if eos_id is None else [eos_id]}
    named["the template"] = sorted(set(renderer.stop_ids).difference(*named.values()))
    ends = [f"{renderer.decode([stop])!r} ({stop})" for stop in renderer.stop_ids]
    for source, ids in named.items():
        beyond = [stop for stop in ids if type(stop) is not int or not 0 <= stop < min(num_rows, renderer.vocab_size)]
        if beyond:
            problems.append(f"{source} ends replies at {beyond}, of which the {renderer.vocab_size} ids know nothing: correct it")
    if named["the template"]:
        remarks.append(
            f"only the template ends a turn with {named['the template']}: servers stop at what generation_config.json and the "
            "tokenizer say, and would write on; add it to `eos_token_id` of generation_config.json before the model is served elsewhere"
        )
    text = (
        f"{renderer.vocab_size} ids for {num_rows} rows of the embedding, {bos}, a short question is {len(prompt_ids)} tokens, "
        f"replies end at {', '.join(ends)}"
    )
    return verdict(text, problems, remarks)


def _generation_eos(directory: Path) -> list[Any]:
    """Return what ends a reply for whoever reads generation_config.json: ids, if the file is right."""
    file = directory / "generation_config.json"
    if not file.is_file():
        return []
    eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    return [token_id for token_id in (eos if isinstance(eos, list) else [eos]) if token_id is not None]
