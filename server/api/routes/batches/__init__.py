"""OpenAI's files and batches (`--batch-folder`).

`routes` has the endpoints. `runner` answers the requests of batches in one process of the server. `work` is one batch
on the disk.
"""
