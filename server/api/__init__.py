"""The HTTP API: `routes` on top, `request` reads their bodies, `answers` writes their responses.

The gate stands before all routes; the other modules are shared by them. The API imports the other packages of
`server`. Only `server.app` and `server.main` import it.
"""
