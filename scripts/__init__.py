"""Where the rooms are wired together: serving, offline generation, benches, set-up. Nobody imports this room."""
