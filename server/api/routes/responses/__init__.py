"""OpenAI's Responses API: a response is a chat whose answer is a list of items, kept in memory for later requests.

`schemas` has the request types, `translation` turns them into chats, `record` is one response, `conversation` is items
that many responses share, `store` keeps both, `writer` writes the answer, `event_log` has the events of one made in the
background, and `routes` and `conversation_routes` have the endpoints.
"""
