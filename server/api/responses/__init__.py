"""OpenAI's Responses API: a response is a chat with its answer as a list of items, kept in memory for the next one.

`schemas` is what requests say, `translation` makes chats of them, `record` is one response, `store` keeps them,
`writer` words the answer, and `routes` puts these together.
"""
