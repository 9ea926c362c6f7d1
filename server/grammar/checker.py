"""Checks that a grammar can be compiled, before its request enters the engine."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from batcher.grammar import GrammarError
from batcher.requests.deep_threads import deep_threads
from server.grammar.compiler import Vocabulary, compile_grammar
from server.grammar.forms import Grammar, ThinkingBudget
from server.http.request_error import RequestError, invalid, overloaded

NUM_THREADS = 2
MAX_WAITING = 64  # grammars that wait for a thread; each takes two seconds at worst
CACHE_SIZE = 1024  # verdicts, of at most a thousand characters each


class GrammarChecker:
    """Makes and compiles grammars in separate threads, so a costly grammar delays only other grammars."""

    def __init__(self, *, timeout_s: float = 10.0) -> None:
        self._timeout_s = timeout_s
        self._threads: ThreadPoolExecutor | None = None  # from the first grammar on
        self.verdicts: OrderedDict[bytes, str] = OrderedDict()  # "" if it can be compiled; used by the event loop only
        self._num_waiting = 0

    async def make(self, form: Callable[[], Grammar], *, param: str) -> Grammar:
        """The grammar that `form` returns. It is not compiled. Raises RequestError 400, which names `param`."""
        try:
            return await self._in_thread(form, param)
        except GrammarError as error:
            raise invalid(param, str(error)) from error

    async def check(self, grammar: str, *, param: str, parts: Sequence[tuple[str, str]] = ()) -> None:
        """Raises RequestError 400 if the grammar cannot be compiled in time.

        `parts` are fields and their grammars, which this grammar contains. They are compiled only if this grammar
        cannot be compiled. The error is then that of the first part that cannot be compiled.
        """
        fault = await self._fault_of(grammar, param)
        if not fault:
            return
        for part_param, part in parts:
            if part_fault := await self._fault_of(part, part_param):
                raise invalid(part_param, part_fault)
        raise invalid(param, fault)

    async def _fault_of(self, grammar: str, param: str) -> str:
        _, grammar = ThinkingBudget.split(grammar)
        key = blake2b(grammar.encode(), digest_size=16).digest()
        fault = self.verdicts.get(key)
        if fault is None:
            fault = await self._in_thread(lambda: self._fault(grammar), param)
            self.verdicts[key] = fault
            if len(self.verdicts) > CACHE_SIZE:
                self.verdicts.popitem(last=False)
        self.verdicts.move_to_end(key)
        return fault

    def _fault(self, grammar: str) -> str:
        try:
            compile_grammar(grammar, Vocabulary.of_bytes())
        except GrammarError as error:
            return str(error)
        return ""

    async def _in_thread[R](self, work: Callable[[], R], param: str) -> R:
        """Runs `work` in a thread. After a timeout the thread goes on until the compiler's own limits end the work."""
        if self._num_waiting >= MAX_WAITING:
            raise overloaded("Too many grammars wait to be compiled.")
        if self._threads is None:
            self._threads = deep_threads(NUM_THREADS, "grammar")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError as error:
            message = f"{param}: it takes longer than {self._timeout_s:g} s to compile."
            raise RequestError(400, message, param=param) from error
        finally:
            self._num_waiting -= 1
