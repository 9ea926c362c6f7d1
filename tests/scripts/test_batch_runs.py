"""Sequences of batch runs that write one output and are killed anywhere: no finished record is lost."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.scripts import generating

FIRST = [f"prompt {i}" for i in range(8)]
INPUTS = (FIRST, FIRST[:4], [*FIRST, "more"], ["another", *FIRST[1:]])
PROCESSES = multiprocessing.get_context("forkserver")  # a process per run, which need not import everything again
PROCESSES.set_forkserver_preload([generating.__name__, "server.text.transformers_parts"])
NUM_EVENTS = 8  # more than a run has


class Runs(RuleBasedStateMachine):
    """What is on the disk after each run is compared with what was there before."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.output, self.partial = self.folder / "out.jsonl", self.folder / "out.jsonl.partial"
        self.model = model
        self.begun: tuple[int, bool] | None = None  # the input of the journal, and whether its run said --overwrite
        for number, prompts in enumerate(INPUTS):
            lines = [{"prompt": prompt, "max_tokens": 2, "temperature": 0} for prompt in prompts]
            (self.folder / f"in-{number}").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def ids(self) -> tuple[set[str], set[str]]:
        """The ids of the finished records in the output and in the journal. A torn record is none."""
        output = self.output.read_text().splitlines() if self.output.exists() else []
        journal = self.partial.read_text().splitlines(keepends=True)[1:] if self.partial.exists() else []
        kept = [json.loads(line)["record"] for line in journal if line.endswith("\n")]
        return {json.loads(line)["id"] for line in output}, {record["id"] for record in kept}

    def run(self, number: int, *flags: str, **killed: object) -> int | None:
        command = ["--model", str(self.model), "--input", str(self.folder / f"in-{number}"), *flags]
        command += ["--output", str(self.output)]
        process = PROCESSES.Process(
            target=generating.killed, args=(command, self.folder / "errors"), kwargs=killed, daemon=True
        )
        process.start()
        process.join(60)
        return process.exitcode

    @rule(
        number=st.integers(0, len(INPUTS) - 1),
        overwrite=st.booleans(),
        killed=st.one_of(
            st.just({}),
            st.fixed_dictionaries({"record": st.integers(1, 9), "name": st.sampled_from(["SIGINT", "SIGKILL"])}),
            st.fixed_dictionaries({"event": st.integers(1, NUM_EVENTS)}),
        ),
    )
    def run_one(self, number: int, overwrite: bool, killed: dict) -> None:
        output, journal = self.ids()
        before = self.output.read_bytes() if self.output.exists() else None
        code = self.run(number, *(["--overwrite"] if overwrite else []), **killed)
        now, left = self.ids()
        if not overwrite and journal and self.begun is not None and self.begun[0] != number:
            assert code == (-signal.SIGKILL if killed.get("event") == 1 else 2)
            assert (now, left) == (output, journal)
        elif not overwrite:
            is_replaced = before is not None and self.begun == (number, True)
            assert before is None or is_replaced or self.output.read_bytes() == before
            assert journal <= now | left
            assert is_replaced or output <= now
        if self.output.exists() and self.output.read_bytes() != before:  # only whole, and only this run's
            told = [json.loads(line)["custom_id"] for line in self.output.read_text().splitlines()]
            assert told == [f"line-{i}" for i in range(1, len(INPUTS[number]) + 1)]
        if not killed:
            assert code in (0, 2)
        if not left:
            self.begun = None
        elif left != journal and not (journal and journal <= left):  # begun by this run
            self.begun = (number, overwrite)

    @rule()
    def finish(self) -> None:
        """The interrupted run's own command ends it."""
        if self.begun is None:
            return
        _, journal = self.ids()
        assert self.run(self.begun[0]) == 0
        now, left = self.ids()
        assert journal <= now and not left
        self.begun = None

    @invariant()
    def only_the_runs_files_are_there(self) -> None:
        extra = {path.name for path in self.folder.iterdir()} - {"out.jsonl", "errors"}
        assert extra - {f"in-{i}" for i in range(len(INPUTS))} <= {"out.jsonl.partial", "out.jsonl.ordered"}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


def test_no_finished_record_is_lost_without_overwrite(model_folder):
    run_state_machine_as_test(lambda: Runs(model_folder), settings=settings(max_examples=10, stateful_step_count=8))


@pytest.mark.parametrize("has_old", [False, True])
def test_a_run_killed_before_any_file_event_goes_on(has_old, model_folder):
    for event in range(1, NUM_EVENTS + 1):
        runs = Runs(model_folder)
        flags = []
        if has_old:
            assert runs.run(1) == 0
            flags = ["--overwrite"]
        old, _ = runs.ids()
        code = runs.run(0, *flags, event=event)
        now, journal = runs.ids()
        if code == 0:
            assert event > 3, "opened, ordered, renamed, removed"
            break
        assert code == -signal.SIGKILL
        assert now == old or len(now) == len(FIRST)
        assert runs.run(0, *(flags if not journal else [])) == 0
        now, left = runs.ids()
        assert len(now) == len(FIRST) and journal <= now and not left
        assert not runs.partial.exists() and not (runs.folder / "out.jsonl.ordered").exists()
        runs.teardown()
    else:
        raise AssertionError(f"a run has more than {NUM_EVENTS} events")
