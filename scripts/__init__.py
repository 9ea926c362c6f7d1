"""Where the rooms are wired together: serving, offline generation, benches, set-up. No other room imports this one."""
