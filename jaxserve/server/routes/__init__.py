"""One file a group of routes. Each handler takes a Starlette request and returns a response; `app` lists them."""
