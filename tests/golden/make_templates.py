"""Makes the tokenizers of `tests/golden/templates/`: one small tokenizer beside each chat template.

The templates are written by hand, in the manner of well-known models and in words of our own; each says on its first line what is peculiar
to it. Run `python -m tests.golden.make_templates` from the root of the project; the result is the same on every run. All share one
recipe, byte-level BPE of a few hundred tokens with digits and line breaks of their own, and differ in their special tokens; `gemma`
has no byte-level alphabet but falls back to bytes, as SentencePiece models do. Where a style has a bos, its tokenizer writes it before bare
text too, so that text which already begins with it would get a second one.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

DIRECTORY = Path(__file__).parent / "templates"
TEXTS = [
    "What is 12 + 30? Use the tool and think about it first.",
    '{"name": "calculator", "arguments": {"expression": "1 + 2"}}',
    "system\nuser\nassistant\ntool\nmodel\nipython\n",
    "The answer is 42. Thank you, and one more question: why?",
    "USER: ASSISTANT: Today is",
]
NUM_MERGES = 60


@dataclasses.dataclass(frozen=True)
class Style:
    """What is peculiar to one tokenizer."""

    specials: tuple[str, ...]
    """Special tokens, which have the ids from 0."""
    eos: str
    """`eos_token` of the tokenizer."""
    generation_eos: tuple[str, ...]
    """What generation_config.json says that ends a reply."""
    bos: str | None = None
    """`bos_token`, put before bare text by the tokenizer."""
    plain: tuple[str, ...] = ()
    """Added tokens that are not special, as tags often are: decoding with `skip_special_tokens` shows them."""
    falls_back_to_bytes: bool = False
    """Words begin with U+2581 and unknown characters are bytes; else the alphabet is the bytes'."""


THINK, TOOLS = ("<think>", "</think>"), ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOTH = ("<|im_end|>", "<|endoftext|>")
STYLES = {
    "chatml": Style(CHATML, "<|im_end|>", BOTH, plain=(*THINK, *TOOLS)),
    # generation_config.json names an end that no turn has: turns end in <|eot_id|>.
    "llama3": Style(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        "<|end_of_text|>",
        ("<|end_of_text|>",),
        bos="<|begin_of_text|>",
    ),
    "qwen3": Style(CHATML, "<|im_end|>", BOTH, plain=(*THINK, *TOOLS)),
    "gemma": Style(
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"), "<eos>", ("<eos>",), bos="<bos>", falls_back_to_bytes=True
    ),
    "mistral": Style(
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"),
        "</s>", ("</s>",), bos="<s>",
    ),
    "no_turn_end": Style(("<unk>", "<s>", "</s>"), "</s>", ("</s>",), bos="<s>"),
    "strips_thinking": Style((*CHATML, *THINK), "<|im_end|>", BOTH, plain=TOOLS),
    "dated": Style(CHATML, "<|im_end|>", BOTH),
    "opens_thinking": Style(
        ("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>"), "<|end|>", ("<|end|>",), bos="<|begin|>",
        plain=(*THINK, "<|tool_calls_begin|>", "<|tool_calls_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_sep|>",
               "<|tool_outputs_begin|>", "<|tool_outputs_end|>", "<|tool_output_begin|>", "<|tool_output_end|>"),
    ),
    "channels": Style(
        ("<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"), "<|return|>",
        ("<|return|>", "<|endoftext|>", "<|call|>"),
    ),
}  # fmt: skip


def make(name: str, directory: Path) -> None:
    """Write the files of one tokenizer into a folder that exists."""
    style = STYLES[name]
    tokenizer = _pieces_over_bytes(style) if style.falls_back_to_bytes else _byte_level(style)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in style.plain])
    if style.bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{style.bos} $A",
            pair=f"{style.bos} $A {style.bos}:1 $B:1",
            special_tokens=[(style.bos, tokenizer.token_to_id(style.bos))],
        )
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": style.bos,
        "eos_token": style.eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    _write_json(directory / "tokenizer_config.json", {key: value for key, value in config.items() if value is not None})
    ends = [tokenizer.token_to_id(token) for token in style.generation_eos]
    _write_json(directory / "generation_config.json", {"eos_token_id": ends if len(ends) > 1 else ends[0]})


def _byte_level(style: Style) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(style.specials) + len(alphabet) + NUM_MERGES,
        special_tokens=list(style.specials),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 8, trainer)
    return tokenizer


def _pieces_over_bytes(style: Style) -> Tokenizer:
    """Train on the characters of the texts, then put the 256 bytes behind the special tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"\u2581?[^\u2581\d\n]+|\u2581|\d|\n"), behavior="isolated")
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    alphabet = {chr(code) for code in range(33, 127)} | {"\n", "\u2581", "é", "ü"}
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + NUM_MERGES, initial_alphabet=sorted(alphabet), show_progress=False)
    trained.train_from_iterator(TEXTS * 8, trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = [*style.specials, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(model["vocab"], key=model["vocab"].get)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = trained.normalizer
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in style.specials])
    return tokenizer


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    for name in STYLES:
        make(name, DIRECTORY / name)
