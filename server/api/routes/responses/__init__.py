"""OpenAI's Responses API: a response is a chat whose answer is a list of items, kept in memory for later requests.

`schemas` has the request type, `translation` turns it into a chat, `record` is one response, `store` keeps records,
`writer` writes the answer, and `routes` has the endpoints.
"""
