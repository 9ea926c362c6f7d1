"""OpenAI's files and batches (`--batch-folder`).

`schemas` has the request types and `routes` the endpoints. `runner` answers the requests of batches, in one process of
the server, and `work` is one batch on the disk.
"""
