"""Answers requests without HTTP: the server's application in this process, and files of requests with a journal.

The package imports `batcher` and `server`, and no other package of `scripts`.
"""
