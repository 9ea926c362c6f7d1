"""OpenAI's API: routes, schemas, limits, the prompt, the forms of answers, counts, and the gate before all routes.

It imports the other three packages. Only `server.app` and `server.main` import this one.
"""
