"""TLS on the server's own sockets: its files, the handshake, and the encryption of a connection's bytes."""
