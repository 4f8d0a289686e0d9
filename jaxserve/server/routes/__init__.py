"""The route handlers, by topic. Each takes a Starlette request and returns a response; `app` lists them."""
