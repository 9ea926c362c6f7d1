"""A model as the routes see it: its tokenizer, templates and formats, and the defaults and limits of its requests."""

from __future__ import annotations

import copy
import logging
import time

from server.engine.protocol import Engine
from server.settings import GenerationDefaults, Settings
from server.text.chat_template import ChatTemplate
from server.text.reasoning import REASONING_FORMATS, ReasoningFormat, reasoning_format_in
from server.text.tokenizer import ByteLevelTokenizer
from server.text.tokenizer_files import ChatTemplates
from server.text.tool_calls.formats import DEFAULT_FORMAT, FORMATS, format_in

logger = logging.getLogger("pallas_serve")


class ServedModel:
    """A model with a name. Formats that the settings do not name are those that its chat template shows.

    Raises TemplateError if a chat template is not valid Jinja.
    """

    adapter = 0  # the identity of the LoRA adapter's weights; 0: there is none

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        tokenizer: ByteLevelTokenizer,
        *,
        name: str,
        root: str,  # the source of the weights; "": as the name
        defaults: GenerationDefaults,
    ) -> None:
        self.name, self.root, self.generation_defaults, self.tokenizer = name, root, defaults, tokenizer
        self.created = int(time.time())
        self._engine = engine
        replacement = settings.chat_template
        sources = ChatTemplates(default=replacement) if replacement else tokenizer.chat_templates
        self.chat_template, tool_template = (  # None: the tokenizer has none
            ChatTemplate(source, special_tokens=tokenizer.special_tokens, variables=tokenizer.template_variables)
            if source
            else None
            for source in (sources.default, sources.tool_use)
        )
        self.tool_template = tool_template or self.chat_template  # for conversations with tools
        self.call_format = FORMATS[_call_format(settings, sources.tool_use or sources.default or "")]
        # None: the whole text is the answer, unless the system message asks for it
        self.reasoning = _reasoning(settings, sources.default or sources.tool_use or "")

    @property
    def vocab_size(self) -> int:
        return self._engine.info.vocab_size

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output of one request."""
        return self._engine.info.max_model_len

    def renamed(self, name: str, *, adapter: int = 0) -> ServedModel:
        """The model under another name, with the LoRA adapter of this identity."""
        other = copy.copy(self)
        other.name, other.adapter = name, adapter
        return other


def _call_format(settings: Settings, template: str) -> str:
    """The name of the format of tool calls, from the settings or the template. The log names one from the template."""
    if settings.tool_call_parser is not None:
        return settings.tool_call_parser
    name = format_in(template)
    if name != DEFAULT_FORMAT:
        logger.info("tool calls are read as --tool-call-parser %s, which the chat template shows to the model", name)
    return name


def _reasoning(settings: Settings, template: str) -> ReasoningFormat | None:
    """The format of reasoning, from the settings or the template. None: the whole text is the answer. The log names a
    format from the template."""
    if settings.reasoning_parser is not None:
        return REASONING_FORMATS[settings.reasoning_parser]
    if (name := reasoning_format_in(template)) is None:
        return None
    logger.info("reasoning is read as --reasoning-parser %s, which the chat template shows", name)
    return REASONING_FORMATS[name]
