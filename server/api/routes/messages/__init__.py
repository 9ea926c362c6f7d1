"""Anthropic's Messages API: a message is a chat whose answer is a list of blocks.

`schemas` has the request types, `translation` turns them into chats, `writer` writes the answer, and `routes` has the
endpoints.
"""
