"""Chat messages to token ids and back, with the model's own chat template, exactly once.

In: a Hugging Face directory (tokenizer.json, a chat template, generation_config.json), messages and tools. Out: one run of
token ids per message and which of them are its own text, the ids of the generation prompt, the ids that end a reply, decoded text. A later
turn continues the very ids that the model saw; where the template rewrites history (it may strip earlier thinking) the turn is a fork,
rendered anew, unless history is to be kept. Sampled ids are never encoded again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.config.model import ToolFormat
from jaxrl.config.turns import History
from jaxrl.errors import EnvError, ModelLoadError
from jaxrl.inference.hub import resolve_model_directory
from jaxrl.inference.rendering.attribution import Bodies, TokenPlaces, find_bodies
from jaxrl.inference.rendering.chat_template import PROBE, ChatTemplate
from jaxrl.inference.rendering.continuation import Way, ways_on
from jaxrl.inference.rendering.messages import Tools, plain_messages, plain_tools
from jaxrl.inference.rendering.replies import ReplyParser
from jaxrl.inference.rendering.tokenizer_files import check_vocabulary, eos_ids, load_tokenizer
from jaxrl.inference.rendering.tool_calls import CallParser, find_parser, tool_prompt
from jaxrl.inference.rendering.turns import RenderedTurn, RenderState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from jaxrl.inference.rendering.known_models import KnownModel


class Renderer:
    """One tokenizer with its chat template. Immutable after construction, so worker threads may share it.

    Note: the text of a special token inside a message becomes that token, as in every chat template.

    Args:
      tokenizer: the policy's.
      chat_template: its template.
      stop_ids: ids that end a reply.
      tool_format: how the policy writes calls of tools; `auto` asks the template.
      parser: takes replies apart; None finds the one of the template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        chat_template: str,
        stop_ids: Iterable[int],
        *,
        tool_format: ToolFormat = "auto",
        parser: ReplyParser | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # Invariant: nothing cuts or pads an encoding; both settings may be stored in tokenizer.json.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._places = TokenPlaces(self._backend)
        self.chat_template = chat_template
        """The template as it was given; the date that it may ask for is pinned when it is used."""
        self.stop_ids = tuple(sorted(set(stop_ids)))
        """Ids that end a reply: the generation config's and the tokenizer's eos, and the template's end of turn."""
        self._template = ChatTemplate(tokenizer, chat_template, self._describe_tools)
        self._tool_format: ToolFormat = tool_format
        self._given_parser = parser
        self._known: KnownModel | None = None

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, tool_format: ToolFormat = "auto") -> Renderer:
        r"""Load the tokenizer, chat template and stop ids of a model directory.

        Args:
          directory: a Hugging Face directory on this machine with tokenizer.json and a chat template, or a name on the
            hub (`org/name`, `org/name@revision`), from which no weights are fetched; generation_config.json and
            config.json are read where they exist.
          tool_format: how the policy writes calls of tools; `auto` asks the template.

        Raises:
          ModelLoadError: a file, the chat template or a special token is missing, or the template ends an assistant
            turn with text that is no stop id, so that a policy that writes it would never stop.

        Example:
          >>> renderer = Renderer.from_pretrained("tests/golden/tokenizer")
          >>> renderer.open_turn(None, [{"role": "user", "content": "hi"}]).text
          '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
        """
        path = resolve_model_directory(directory, "tokenizer")
        tokenizer = load_tokenizer(path)
        try:
            chat_template = tokenizer.get_chat_template()
        except ValueError as error:
            raise ModelLoadError(
                f"{path}: the tokenizer has no chat template, so messages cannot be turned into tokens; "
                "add `chat_template` to tokenizer_config.json or a chat_template.jinja file"
            ) from error
        check_vocabulary(path, tokenizer)
        known_ids = eos_ids(path, tokenizer)
        try:
            turn_end_id = cls(tokenizer, chat_template, known_ids, tool_format=tool_format).turn_end_id
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error}") from error.__cause__
        renderer = cls(tokenizer, chat_template, known_ids | {turn_end_id}, tool_format=tool_format)
        renderer.parser  # noqa: B018  what it has to say of the template is said at the start
        return renderer

    def with_known(self, known: KnownModel, parser: ReplyParser) -> Renderer:
        """Return a renderer that asks a known model first, and reads replies with `parser`; its own template is what is left to it."""
        stop_ids = (*self.stop_ids, *known.stop_ids)
        renderer = Renderer(self._tokenizer, self.chat_template, stop_ids, tool_format=self._tool_format, parser=parser)
        renderer._known = known
        return renderer

    @property
    def knows_model(self) -> bool:
        """True if a known model comes before the chat template."""
        return self._known is not None

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer by itself, for what its files say beside what is made of them."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows, special tokens included."""
        return len(self._tokenizer)

    @functools.cached_property
    def num_ids(self) -> int:
        """The highest id that the tokenizer knows, plus 1; more than `vocab_size` where ids are left out."""
        return 1 + max(self._tokenizer.get_vocab().values())

    @functools.cached_property
    def bos_id(self) -> int | None:
        """The special token that the template puts before a conversation, once; None if it puts none.

        A token that begins every message is none, even if the tokenizer calls it bos, as ChatML's `<|im_start|>` often is.
        """
        turn = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
        ids = self.message_ids([*turn, turn[0]]).tolist()
        is_special = bool(ids) and ids[0] in self._backend.get_added_tokens_decoder()
        return ids[0] if is_special and ids.count(ids[0]) == 1 else None

    def longest_token(self) -> int:
        """Return the characters of the longest token in the vocabulary."""
        return max(map(len, self._tokenizer.get_vocab()))

    @property
    def parser(self) -> ReplyParser:
        """Takes replies apart."""
        return self._given_parser or self._call_parser

    @functools.cached_property
    def _call_parser(self) -> CallParser:
        return find_parser(self._backend, self._template.render, self._tool_format)

    @property
    def writes_tools(self) -> bool:
        """True if the chat template shows the policy the tools that it is given; else the system message tells of them."""
        return self._template.writes_tools

    def open_turn(
        self,
        prior: RenderState | None,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        history: History = "template",
    ) -> RenderedTurn:
        """Render the prompt of the next reply.

        With `prior`, the prompt is its ids followed by the ids of what the template writes after it, encoded on their own. If the
        template rewrites what the model saw, the turn is a fork: the whole conversation is rendered and encoded anew. White space that
        it trims off a reply rewrites nothing.

        Args:
          prior: what `close_turn` returned after the last reply; None in the first turn.
          messages: the new messages, at least one, as OpenAI's API has them. They are copied; arguments of calls that are a JSON text
            become objects.
          tools: the schemas of all tools that the policy may call; others than before rewrite history.
          history: `template` follows the template; `keep` continues what the model saw even where the template would rewrite it, and
            forks only over other tools or messages that the template refuses.

        Raises:
          EnvError: no message, a message without role or text, or a conversation that the template refuses.

        Example:
          >>> renderer = Renderer.from_pretrained("tests/golden/tokenizer")
          >>> first = renderer.open_turn(None, [{"role": "user", "content": "hi"}])
          >>> state = renderer.close_turn(first, renderer.encode("hello<|im_end|>"))
          >>> second = renderer.open_turn(state, [{"role": "user", "content": "ok"}])
          >>> [renderer.decode(span[mask]) for span, mask in zip(second.spans, second.content_masks)]
          ['ok']
        """
        new, schemas = plain_messages(messages), plain_tools(tools)
        if self._known is not None and (known := self._known.open_turn(prior, new, schemas, history)) is not None:
            return known
        way, bodies = self._way_on(ways_on(self._template, prior, new, schemas, history, self._stop_texts))
        spans, masks, generation_prompt = self._encode(way, bodies, None if prior is None or way.is_fork else prior.token_ids)
        seen_ids, seen = np.zeros(0, np.int32), ""
        if prior is not None and not way.is_fork:
            seen_ids, seen = prior.token_ids, prior.text + prior.stop_text
        return RenderedTurn(
            messages=(prior.messages if prior else ()) + new,
            tools=schemas,
            replies=prior.replies if prior else {},
            text=seen + way.text[way.start :],
            template_text=way.text if way.is_as_rendered else None,
            prompt_ids=np.concatenate([seen_ids, *spans, generation_prompt]),
            spans=tuple(spans),
            content_masks=tuple(masks),
            generation_prompt=generation_prompt,
            is_fork=way.is_fork,
        )

    def close_turn(self, turn: RenderedTurn, sampled_ids: np.ndarray) -> RenderState:
        """Return the conversation after the policy's reply; the reply's ids are kept as they are.

        Args:
          turn: the prompt that was answered.
          sampled_ids: [N] int32, N >= 0, a sampled stop id included.
        """
        sampled_ids = np.asarray(sampled_ids, np.int32)
        said_ids = self._without_stop(sampled_ids)
        content = self.decode(said_ids)
        reply = self.parser.parse(said_ids, turn=turn.index)
        return RenderState(
            messages=(*turn.messages, {"role": "assistant", "content": content}),
            tools=turn.tools,
            replies={**turn.replies, len(turn.messages): reply},
            text=turn.text + content,
            stop_text=self.decode(sampled_ids[len(said_ids) :]),
            template_text=turn.template_text,
            token_ids=np.concatenate([turn.prompt_ids, sampled_ids]),
            num_sampled=len(sampled_ids),
        )

    def reply_text(self, sampled_ids: np.ndarray) -> str:
        """Return the text of a reply without its final stop id. For people and scorers: the truth is in the ids."""
        return self.decode(self._without_stop(sampled_ids))

    def prompt_text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text of `open_turn(None, messages, tools=tools)`, in time that is linear in the number of messages; raises alike.

        Its ids are `encode(text, add_special_tokens=False)`, unless it `knows_model`: then `open_turn` is linear too.
        """
        render = self._known.render_text if self._known is not None else self._template.render
        return render(plain_messages(messages), plain_tools(tools), add_generation_prompt=True)

    def message_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Return [n] int32 ids of a conversation that nobody is asked to continue: no generation prompt follows it.

        Raises:
          EnvError: no message, a message without role or text, or a conversation that the template refuses.
        """
        plain, schemas = plain_messages(messages), plain_tools(tools)
        if self._known is not None:
            return self._known.message_ids(plain, schemas)
        text = self._template.render(plain, schemas, add_generation_prompt=False)
        return self.encode(text, add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """Return [n] int32 ids of a text, by default with the tokens that the tokenizer puts around a bare one (such as bos)."""
        return np.asarray(self._backend.encode(text, add_special_tokens=add_special_tokens).ids, np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of token ids, special tokens included; bytes that are no UTF-8 read as U+FFFD."""
        return self._backend.decode([int(token) for token in token_ids], skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token as it reads inside a text: at the beginning of one, some tokenizers leave out its space."""
        before = [self.stop_ids[0]]
        return self.decode([*before, token_id])[len(self.decode(before)) :]

    @functools.cached_property
    def turn_end_id(self) -> int:
        """The id that ends a reply: the first added token that the template puts after an assistant's text; eos where it puts none.

        Raises:
          ModelLoadError: the template ends a reply with a text that is no token, or with nothing while no eos is known, or cannot
            render an answer.
        """
        try:
            end = self._template.reply_end
        except EnvError as error:
            raise ModelLoadError(f"the chat template cannot render a question and an answer: {error}") from error
        for token_id in self._backend.encode(end, add_special_tokens=False).ids:
            if token_id in self._added_tokens:
                return token_id
        if not end.strip():
            eos = self._tokenizer.eos_token_id
            if isinstance(eos, int) or self.stop_ids:
                return eos if isinstance(eos, int) else self.stop_ids[0]
        raise ModelLoadError(
            f"the chat template ends an assistant turn with {end!r}, which holds no special token of the tokenizer, "
            f"so a reply would never stop there (stop tokens known: {[self._backend.id_to_token(i) for i in self.stop_ids]}); "
            "add the token to tokenizer.json"
        )

    @functools.cached_property
    def _added_tokens(self) -> dict[int, str]:
        return {token_id: token.content for token_id, token in self._backend.get_added_tokens_decoder().items()}

    @functools.cached_property
    def _stop_texts(self) -> tuple[str, ...]:
        return tuple(self.decode([token_id]) for token_id in self.stop_ids)

    def _describe_tools(self, tools: Tools) -> str:
        return tool_prompt(tools, self._call_parser.format.name)

    def _without_stop(self, sampled_ids: np.ndarray) -> np.ndarray:
        is_stopped = len(sampled_ids) > 0 and int(sampled_ids[-1]) in self.stop_ids
        return sampled_ids[:-1] if is_stopped else sampled_ids

    def _way_on(self, ways: Iterator[Way]) -> tuple[Way, Bodies]:
        """Return the first way in which the results of tools are written: some templates write none without the calls."""
        kept: tuple[Way, Bodies] | None = None
        for way in ways:
            render = functools.partial(self._template.render, tools=way.tools, add_generation_prompt=True)
            bodies = find_bodies(render, way.messages, way.first, way.text, way.spellings)
            if not any(way.messages[index]["role"] == "tool" for index in bodies.left_out):
                return way, bodies
            kept = kept or (way, bodies)
        assert kept is not None, "ways_on raises where it yields nothing"
        return kept

    def _encode(
        self, way: Way, bodies: Bodies, seen_ids: np.ndarray | None
    ) -> tuple[list[np.ndarray], list[np.ndarray | None], np.ndarray]:
        """Encode what the model has not seen in one go and cut the ids at the ends of the messages.

        Returns:
          The ids of each new message, which of them are its own text, and the ids of the generation prompt.
        """
        # Behind a special token a text may be encoded in another way than at a beginning, where some tokenizers put a space.
        last_id = None if seen_ids is None or len(seen_ids) == 0 else int(seen_ids[-1])
        before = "" if last_id is None else self._added_tokens.get(last_id, "")
        encoding = self._backend.encode(text := before + way.text[way.start :], add_special_tokens=False)
        if before and encoding.ids[0] != last_id:  # not every added token is read wherever it stands
            before = ""
            encoding = self._backend.encode(text := way.text[way.start :], add_special_tokens=False)
        begins, ends, unit = self._places.of(encoding, text)
        token_ids, begins, ends = (np.asarray(one)[bool(before) :] for one in (encoding.ids, begins, ends))

        def place(index: int) -> int:
            return unit(max(0, index - way.start) + len(before))

        # A token belongs where its first character lies; where two texts part, the token in which they do so is the one that follows.
        # `accumulate` keeps the pieces in order whatever a normalizer does to offsets.
        parted, places = zip(*((is_parting, place(end)) for end, is_parting in self._ends(way, bodies)), strict=True)
        by_begin = np.searchsorted(np.maximum.accumulate(begins), places, side="left")
        by_end = np.searchsorted(np.maximum.accumulate(ends), places, side="right")
        cuts = np.maximum.accumulate(np.where(parted, by_end, by_begin))
        *spans, generation_prompt = np.split(token_ids.astype(np.int32), cuts)
        masks: list[np.ndarray | None] = []
        for index, first, last in zip(range(way.first, len(way.messages)), [0, *cuts], cuts, strict=False):
            if index not in bodies.spans:
                masks.append(None)
                continue
            is_content = np.zeros(last - first, bool)
            for body in bodies.spans[index]:
                begin, end = map(place, body)
                is_content |= (begins[first:last] >= begin) & (ends[first:last] <= end) & (ends[first:last] > begins[first:last])
            masks.append(is_content)
        return spans, masks, generation_prompt

    def _ends(self, way: Way, bodies: Bodies) -> list[tuple[int, bool]]:
        """Return where each new message ends in the text of `way`: where the template would end a conversation that stops with it.

        That takes a rendering for each, so where the same stands between the texts of two messages like two before, it parts as it did
        there: the time is linear in the number of messages unless they all differ.

        Returns:
          Indices into the text, and whether two texts part there.
        """
        ends: list[tuple[int, bool]] = []
        seen: dict[object, tuple[int, bool]] = {}
        for index in range(way.first, len(way.messages)):
            before = ends[-1][0] if ends else way.start
            gap = _gap(way, bodies, index)
            if gap is None:
                ends.append(self._end(way, bodies, index, before))
                continue
            own_end = bodies.spans[index][-1][1]
            if gap not in seen:
                end, is_parting = self._end(way, bodies, index, before)
                seen[gap] = end - own_end, is_parting
            behind, is_parting = seen[gap]
            ends.append((max(before, own_end + behind), is_parting))
        return ends

    def _end(self, way: Way, bodies: Bodies, index: int, before: int) -> tuple[int, bool]:
        """Return where one message ends, not before `before`, and whether two texts part there.

        A message that the template ends in another way if more follows, as it may do with the results of parallel calls, ends where the
        two part, but not before its own text. One whose end cannot be told has no text: what there is belongs to the next one.
        """
        try:
            upto = self._template.render(way.messages[: index + 1], way.tools, add_generation_prompt=False)
        except EnvError:  # a template may refuse a conversation that stops here
            upto = ""
        if upto and way.text.startswith(upto):
            return max(before, len(upto)), False
        if index == len(way.messages) - 1:
            return len(way.text), False
        parting = _parting(upto, way.text, bodies, index)
        return max(before, parting), parting > before


def _gap(way: Way, bodies: Bodies, index: int) -> object | None:
    """Return what stands between the text of a message and the next one's, and which kinds of messages these are.

    None if that does not tell where the message ends: a template may trim the last message of a conversation in another way.
    """
    if index + 1 >= len(way.messages) or len(own := bodies.spans.get(index, ())) != 1 or not (following := bodies.spans.get(index + 1)):
        return None
    content, text = way.messages[index]["content"], way.text[slice(*own[0])]
    if not content.endswith(text):
        return None
    what_is_left = next((number for number, left in enumerate((content, content.lstrip())) if left == text), None)
    around = way.messages[max(0, index - 1) : index + 2]
    return way.text[own[0][1] : following[0][0]], what_is_left, tuple((message["role"], *sorted(message)) for message in around)


def _parting(upto: str, text: str, bodies: Bodies, index: int) -> int:
    """Return the end of a message in `text` from what the template writes up to it, which is no beginning of `text`; 0 if unknown."""
    own = bodies.spans.get(index)
    if not own:
        return 0
    later = [begin for other, spans in bodies.spans.items() if other > index for begin, _ in spans[:1]]
    end = max(own[-1][1], _num_same(upto, text))
    return end if end <= min(later, default=len(text)) else 0


def _num_same(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
