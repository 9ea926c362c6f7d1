"""The HTTP API. `routes` has the endpoints, `request` reads request bodies, and `answers` writes responses.

All requests pass the gate first. The other modules are shared by the routes. The API imports the other packages of
`server`. Only `server.app` and `server.main` import it.
"""
