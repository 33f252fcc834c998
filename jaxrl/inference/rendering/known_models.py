"""Models that the `renderers` package knows: their messages and replies in tokens, without their chat template.

In: the setting `model.renderer`, a model's name, its tokenizer. Out: a `Renderer` that asks the package. The package says of every token
whose it is and whether it is a message's own text, goes on after sampled tokens, and reads replies of formats that only it knows. Where it
will not go on from what the model saw though history is to be kept, the tokenizer's own template does. The package is optional: nothing
else imports it. Of an assistant's message it calls everything own text that the model would sample, calls of tools and the end too.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.config.model import ToolFormat
from jaxrl.config.turns import History
from jaxrl.errors import ConfigError, EnvError
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.messages import Messages, Tools, told_apart
from jaxrl.inference.rendering.replies import ParsedReply, ReplyParser
from jaxrl.inference.rendering.tool_calls import find_parser
from jaxrl.inference.rendering.tool_calls.base import plain_call_id
from jaxrl.inference.rendering.tool_calls.json_text import JsonError, excerpt, read_object
from jaxrl.inference.rendering.tool_calls.parser import reads_like_a_call
from jaxrl.inference.rendering.turns import RenderedTurn, RenderState
from jaxrl.types import ToolCall

if TYPE_CHECKING:
    from renderers import ParsedResponse, ParsedToolCall, RenderedTokens  # pyright: ignore[reportMissingImports]
    from renderers import Renderer as PackageRenderer  # pyright: ignore[reportMissingImports]

_INSTALL = "pip install 'jaxrl[renderers]'"
_NOT_A_MODEL = frozenset({"auto", "default", "custom"})
"""Names of the package's registry that stand for no model."""
_PROBE: Messages = ({"role": "user", "content": "hello"},)
_WHY = {
    "invalid_json": "the arguments are no JSON",
    "unclosed_block": "the call is not closed",
    "missing_name": "the call names no tool",
    "malformed_structure": "the call does not have the form that this model writes calls in",
}
"""The package's words for malformed calls, in words for the policy."""

_log = logging.getLogger(__name__)


def load_renderer(model_name: str, *, renderer: str = "auto", tool_format: ToolFormat = "auto") -> Renderer:
    """Load what turns a model's messages into tokens, and say in the log what that is.

    Args:
      model_name: a directory, or a name on the hub, as `Renderer.from_pretrained` takes it.
      renderer: `auto` asks the `renderers` package if it is installed and knows the very name of the model; `template` never asks it; any
        other word is a name of its registry.
      tool_format: how the policy writes calls of tools.

    Raises:
      ConfigError: the package is named and not installed, or does not know the name, or the name does not fit the tokenizer.
      ModelLoadError: as `Renderer.from_pretrained`.
    """
    registered = _registered(model_name, renderer)
    own = Renderer.from_pretrained(model_name, tool_format=tool_format)
    if registered is None:
        _log.info("messages become tokens by the tokenizer's own chat template; %s", own.parser.how)
        return own
    try:
        known = KnownModel(registered, model_name, own)
    except ConfigError as error:
        if renderer != "auto":
            raise
        _log.warning("messages become tokens by the tokenizer's own chat template: %s", error)
        return own
    if not np.array_equal(known.message_ids(_PROBE, ()), own.message_ids(_PROBE)):
        _log.warning(
            "the renderer %r writes a plain question in other tokens than the chat template of %s; if the template is right, set "
            "`model.renderer`='template'",
            registered,
            model_name,
        )
    parser: ReplyParser = find_parser(own.tokenizer.backend_tokenizer, known.render_text, tool_format)
    if tool_format == "auto" and not parser.is_proven:
        parser = KnownReplyParser(known)
    _log.info("messages become tokens by the renderer %r of the `renderers` package; %s", registered, parser.how)
    return own.with_known(known, parser)


def _registered(model_name: str, renderer: str) -> str | None:
    """Return the name in the package's registry, or None for the tokenizer's own template."""
    if renderer == "template":
        return None
    if importlib.util.find_spec("renderers") is None:
        if renderer == "auto":
            return None
        raise ConfigError(
            f"`model.renderer`={renderer!r} is a name of the `renderers` package, which is not installed; {_INSTALL}, or set it to "
            "'template', which needs no package"
        )
    from renderers import config_from_name  # pyright: ignore[reportMissingImports]
    from renderers.base import MODEL_RENDERER_MAP  # pyright: ignore[reportMissingImports]

    if renderer == "auto":
        return MODEL_RENDERER_MAP.get(model_name.partition("@")[0])
    names = sorted(set(MODEL_RENDERER_MAP.values()))
    try:
        is_known = renderer not in _NOT_A_MODEL and config_from_name(renderer) is not None
    except ValueError:
        is_known = False
    if not is_known:
        raise ConfigError(
            f"`model.renderer`={renderer!r} is no model of the `renderers` package; it knows {', '.join(names)}; or set it to 'auto' or "
            "'template'"
        )
    return renderer


class KnownModel:
    """One model of the package. Immutable after construction, so worker threads may share it.

    Args:
      name: its name in the package's registry.
      model_name: the model that is rendered for.
      own: its tokenizer.

    Raises:
      ConfigError: the tokenizer is not one of this model.
    """

    def __init__(self, name: str, model_name: str, own: Renderer) -> None:
        from renderers import config_from_name, create_renderer  # pyright: ignore[reportMissingImports]

        self.name = name
        self.decode = own.decode
        tokenizer = own.tokenizer
        # The package tells sizes of one family apart by the name on the hub; the files lie under another one.
        tokenizer.name_or_path = model_name.partition("@")[0]
        config: Any = config_from_name(name)
        try:
            self._template: PackageRenderer = create_renderer(tokenizer, config)
            self._keeping: PackageRenderer = create_renderer(tokenizer, config.model_copy(update={"thinking_retention": "all"}))
        except Exception as error:  # whatever the package finds missing, it asserts
            raise ConfigError(
                f"`model.renderer`={name!r} does not fit the tokenizer of {model_name}: {error}; set it to 'template', which follows the "
                "tokenizer's own chat template"
            ) from error
        self.stop_ids = tuple(self._template.get_stop_token_ids())
        """Ids that end a reply."""

    def open_turn(self, prior: RenderState | None, new: Messages, tools: Tools, history: History) -> RenderedTurn | None:
        """Return the prompt of the next reply; None if history is to be kept and the package cannot go on from what the model saw.

        Args:
          prior: what the model saw; None in the first turn.
          new: the new messages.
          tools: what the policy may call.
          history: `template` forks where the model's template rewrites history, which the package knows; `keep` goes on in any case.

        Raises:
          EnvError: the package refuses the conversation.
        """
        conversation = (prior.messages if prior else ()) + new
        if prior is None:
            return self._turn(self._render(conversation, tools, add_generation_prompt=True), None, conversation, tools)
        may_go_on = tools == prior.tools
        if may_go_on:
            package = self._keeping if history == "keep" else self._template
            if (extended := self._extend(package, prior, new, tools)) is not None:
                return self._turn(extended, prior, conversation, tools)
            if history == "keep":
                return None
        anew = self._render(told_apart(conversation, prior.replies), tools, add_generation_prompt=True)
        # The package renders anew whenever a user speaks. Where that changes nothing, the model's own tokens stay.
        if may_go_on and self._shows(anew, prior) and (extended := self._extend(self._keeping, prior, new, tools)) is not None:
            return self._turn(extended, prior, conversation, tools)
        return self._turn(anew, prior, conversation, tools, is_fork=True)

    def message_ids(self, messages: Messages, tools: Tools) -> np.ndarray:
        """Return [n] int32 ids of a conversation that nobody is asked to continue.

        Raises:
          EnvError: the package refuses it.
        """
        return np.asarray(self._render(messages, tools, add_generation_prompt=False).token_ids, np.int32)

    def render_text(self, messages: Sequence[Mapping[str, Any]], tools: Tools = (), *, add_generation_prompt: bool) -> str:
        """Return the text of a conversation.

        Raises:
          EnvError: the package refuses it.
        """
        return self.decode(self._render(messages, tools, add_generation_prompt=add_generation_prompt).token_ids)

    def parse(self, token_ids: Sequence[int]) -> ParsedResponse:
        """Return what the package makes of a reply; it may raise anything."""
        return self._template.parse_response(list(token_ids), prompt_ids=self._render(_PROBE, (), add_generation_prompt=True).token_ids)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Tools, *, add_generation_prompt: bool) -> RenderedTokens:
        given: Any = [dict(message) for message in messages]
        schemas: Any = list(tools) or None
        try:
            return self._template.render(given, tools=schemas, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # it asserts, and looks up what may be missing
            roles = [message.get("role") for message in messages]
            raise EnvError(f"the renderer {self.name!r} refused messages with the roles {roles}: {error!r}") from error

    def _extend(self, package: PackageRenderer, prior: RenderState, new: Messages, tools: Tools) -> RenderedTokens | None:
        """Return what the model saw, with the new messages behind it; None if the package would render it anew."""
        seen = prior.token_ids.tolist()
        cut = len(seen) - prior.num_sampled
        messages: Any = [dict(message) for message in new]
        schemas: Any = list(tools) or None
        try:
            extended = package.bridge_to_next_turn(seen[:cut], seen[cut:], messages, tools=schemas)
        except Exception:  # whatever the policy wrote there, the conversation can be rendered anew
            return None
        return extended if extended is not None and extended.token_ids[: len(seen)] == seen else None

    def _shows(self, rendered: RenderedTokens, prior: RenderState) -> bool:
        """Say whether a conversation begins with what the model saw, white space aside."""
        return "".join(self.decode(rendered.token_ids).split()).startswith("".join(prior.text.split()))

    def _turn(
        self, rendered: RenderedTokens, prior: RenderState | None, conversation: Messages, tools: Tools, *, is_fork: bool = False
    ) -> RenderedTurn:
        """Return a turn whose prompt is `rendered`; unless it is a fork, that begins with what the model saw."""
        start, num_seen = (len(prior.token_ids), len(prior.messages)) if prior and not is_fork else (0, 0)
        token_ids = np.asarray(rendered.token_ids, np.int32)
        cuts = start + _ends(np.asarray(rendered.message_indices[start:], np.int64), len(conversation) - num_seen)
        is_content = np.asarray(rendered.is_content, bool) if rendered.is_content else None
        bounds = list(zip([start, *cuts], cuts, strict=False))
        return RenderedTurn(
            messages=conversation,
            tools=tools,
            replies=prior.replies if prior else {},
            text=self.decode(token_ids),
            template_text=None,
            prompt_ids=token_ids,
            spans=tuple(token_ids[begin:end] for begin, end in bounds),
            content_masks=tuple(None if is_content is None else is_content[begin:end] for begin, end in bounds),
            generation_prompt=token_ids[cuts[-1] :],
            is_fork=is_fork,
        )


class KnownReplyParser:
    """Reads the replies of a known model with the package, for formats that nobody else reads.

    Args:
      known: the model.
    """

    def __init__(self, known: KnownModel) -> None:
        self._known = known
        self._decode = known.decode
        self.how = f"calls of tools are read by the renderer {known.name!r}, which has a format of its own"

    def parse(self, token_ids: np.ndarray, *, turn: int) -> ParsedReply:
        """Take a reply apart; nothing that a model writes makes it raise."""
        ids = [int(token) for token in token_ids]
        try:
            said = self._known.parse(ids)
            calls = tuple(_tool_call(call, turn, index) for index, call in enumerate(said.tool_calls))
            reasoning = (said.reasoning_content or "").strip()
            is_unread = not calls and reads_like_a_call(said.content or reasoning)
            return ParsedReply(content=said.content, reasoning=reasoning, tool_calls=calls, has_unread_call=is_unread)
        except Exception:  # the package reads ids that no model of its own may have written
            return ParsedReply(content=self._decode(ids), has_unread_call=True)


def _tool_call(call: ParsedToolCall, turn: int, index: int) -> ToolCall:
    call_id, name, arguments = call.id or plain_call_id(turn, index), call.name or "", call.arguments
    error = _WHY.get(call.status, "") if name else _WHY["missing_name"]
    if not error:
        try:
            raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            members, end = read_object(raw)
            if raw[end:].strip():
                raise JsonError("expected one JSON object and nothing after it")
        except JsonError as refusal:
            error = str(refusal)
        else:
            return ToolCall(call_id, name, {key: member.value for key, member in members.items()}, raw)
    return ToolCall(call_id, name, None, call.raw, f"the call cannot be read: {error}, got {excerpt(call.raw)}")


def _ends(owners: np.ndarray, num_messages: int) -> np.ndarray:
    """Return [num_messages] where each message ends, from whose each token is; -1 is nobody's.

    What stands before a message and is nobody's belongs to it. What stands behind the last one is the generation prompt. Templates may
    put results of tools into another order: the pieces stay in the order of the messages.

    Example:
      >>> _ends(np.array([-1, 0, 0, -1, 1, -1, -1]), 2)
      array([3, 5])
    """
    mine = np.flatnonzero(owners >= 0)
    last = int(mine[-1]) + 1 if len(mine) else 0
    following = mine[np.searchsorted(mine, np.arange(last))]
    return np.searchsorted(np.maximum.accumulate(owners[following]), np.arange(num_messages), side="right")
