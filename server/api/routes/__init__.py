"""The routes and their endpoints: OpenAI's API, Anthropic's in `messages`, and the routes for operators."""
