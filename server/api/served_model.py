"""Models as the routes see them: their tokenizers, templates and formats, and the defaults and limits of requests."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from model.inputs.words import described
from server.engine.protocol import Engine
from server.engine.wire import EngineInfo, LoadedModel
from server.http.request_error import RequestError
from server.settings import GenerationDefaults, Settings
from server.text.chat_template import ChatTemplate
from server.text.reasoning import REASONING_FORMATS, ReasoningFormat, reasoning_format_in
from server.text.tokenizer import ByteLevelTokenizer
from server.text.tokenizer_files import ChatTemplates
from server.text.tool_calls.formats import DEFAULT_FORMAT, FORMATS, format_in

logger = logging.getLogger("pallas_serve")

MOST_KEPT = 64  # models whose files have been read, besides those of running requests


class ServedModel:
    """A model with a name. Formats that the settings do not name are those that its chat template shows.

    Raises TemplateError if a chat template is not valid Jinja.
    """

    identity = 0  # of the weights; 0: the engine started with them
    _loaded: LoadedModel | None = None  # None: it is the engine's own model
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
    def _info(self) -> LoadedModel | EngineInfo:
        return self._loaded or self._engine.info

    @property
    def vocab_size(self) -> int:
        return self._info.vocab_size

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output of one request."""
        return self._info.max_model_len

    @property
    def embedding_size(self) -> int | None:
        """Numbers of an embedding; None: there are none."""
        return self._info.embedding_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return self._info.eos_token_ids

    @property
    def weights(self) -> int:
        """The identity of its weights with the adapter's."""
        return self.identity ^ self.adapter

    def renamed(self, name: str, *, adapter: int = 0) -> ServedModel:
        """The model under another name, with the LoRA adapter of this identity."""
        other = copy.copy(self)
        other.name, other.adapter = name, adapter
        return other

    def with_weights(self, loaded: LoadedModel) -> ServedModel:
        """The model with the weights of another one."""
        other = self.renamed(loaded.name)
        other.identity, other.root, other._loaded = loaded.identity, loaded.path, loaded
        return other


class ServedModels:
    """The models that were loaded besides the first one, whose files are read when a request first names one.

    Args:
        first: the model of the start.
    """

    def __init__(self, settings: Settings, engine: Engine, first: ServedModel) -> None:
        self._settings, self._engine, self._first = settings, engine, first
        self._read: dict[LoadedModel, asyncio.Task[ServedModel]] = {}  # the most recently used last

    async def find(self, loaded: LoadedModel) -> ServedModel:
        """The model with its files. Raises RequestError 400 if they cannot be used."""
        try:
            return await self._get(loaded)
        except (ValueError, OSError) as error:
            words = described(error).replace(loaded.folder, loaded.name)  # clients read it
            raise RequestError(400, f"The model {loaded.name} cannot be used: {words}", param="model") from error

    async def read_all(self) -> None:
        """Reads the files of the models of the start. Raises ValueError if some cannot be used."""
        for loaded in self._engine.models.values():
            try:
                await self._get(loaded)
            except (ValueError, OSError) as error:
                raise ValueError(f"--models {loaded.name}={loaded.path}: {described(error)}") from error

    async def _get(self, loaded: LoadedModel) -> ServedModel:
        if not loaded.folder:
            return self._first.with_weights(loaded)
        if loaded not in self._read:
            there = {*self._engine.models.values()}
            self._read = {other: read for other, read in self._read.items() if other in there}
            known = [read.result() for read in self._read.values() if read.done() and not read.exception()]
            tokenizers = [model.tokenizer for model in (self._first, *known)]
            self._read[loaded] = asyncio.create_task(asyncio.to_thread(self._model, loaded, tokenizers))
        reading = self._read[loaded] = self._read.pop(loaded)
        if len(self._read) > MOST_KEPT:
            del self._read[next(iter(self._read))]
        try:
            return await asyncio.shield(reading)
        except (ValueError, OSError):
            if self._read.get(loaded) is reading:
                del self._read[loaded]
            raise

    def _model(self, loaded: LoadedModel, known: Sequence[ByteLevelTokenizer]) -> ServedModel:
        folder, settings = Path(loaded.folder), self._settings
        tokenizer = ByteLevelTokenizer.from_folder(folder, vocab_size=loaded.vocab_size, known=known)
        is_adapter = (folder / "adapter_config.json").exists()
        defaults = self._first.generation_defaults if is_adapter else settings.generation_rules.defaults_of(folder)
        model = ServedModel(settings, self._engine, tokenizer, name=loaded.name, root=loaded.path, defaults=defaults)
        return model.with_weights(loaded)


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
