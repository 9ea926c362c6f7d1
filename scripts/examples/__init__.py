"""Short programs that use the server or the engine. The server must run: `scripts/serve`."""
