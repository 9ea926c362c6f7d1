"""How much of the log a client can fill."""

from __future__ import annotations

import logging

from server.logs import ThrottledLog


def test_a_flood_is_a_line_and_then_its_count(caplog):
    now = [0.0]
    log = ThrottledLog(logging.getLogger("test"), interval_s=10, clock=lambda: now[0])
    for i in range(100):
        log.warning("%d was refused", i)
    assert [record.getMessage() for record in caplog.records] == ["0 was refused"]
    log.warning("another matter")
    assert len(caplog.records) == 2
    now[0] = 10.0
    log.warning("%d was refused", 100)
    assert caplog.records[-1].getMessage() == "100 was refused (99 more like it since the last such line)"
    now[0] = 20.0
    log.warning("%d was refused", 101)
    assert caplog.records[-1].getMessage() == "101 was refused"


def test_an_exception_brings_its_traceback(caplog):
    log = ThrottledLog(logging.getLogger("test"))
    for _ in range(2):
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            log.exception("%s failed", "it")
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "it failed")
    assert record.exc_info[0] is RuntimeError
