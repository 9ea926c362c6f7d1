"""The routes, each with its endpoint: OpenAI's, Anthropic's in `messages`, and those of an operator."""
