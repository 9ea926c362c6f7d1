"""OpenAI's Responses API: a response is a chat whose answer is a list of items, kept for later requests.

`schemas` has the request types, `translation` turns them into chats, `record` is a response that is being made, `items`
are the parts of inputs and answers, `store` keeps responses and conversations in the database, `writer` writes the
answer, `events` sends those of a response in the background, and `routes` and `conversation_routes` have the endpoints.
"""
