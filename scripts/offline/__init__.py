"""Requests without HTTP: the server's application in this process, and files of requests with a journal of answers.

Knows `batcher` and `server`, and no other room of `scripts`.
"""
