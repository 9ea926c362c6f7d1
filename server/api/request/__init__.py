"""From the body of a request to a running generation: fields, checks, the prompt, tools, the grammar, submission."""
