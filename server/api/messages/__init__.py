"""Anthropic's Messages API, for clients that speak it: a message is a chat with its answer as a list of blocks.

`schemas` is what requests say, `translation` makes chats of them, `writer` words the answer, `routes` puts these
together.
"""
