"""OpenAI's API: routes, schemas, limits, the prompt, the forms of answers, counts and the gate before all routes.

Knows the other three rooms. Only `server.app` and `server.main` know this one.
"""
