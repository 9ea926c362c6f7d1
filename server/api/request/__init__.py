"""Turns the body of a request into a running generation: fields, checks, prompt, tools, grammar and submission."""
