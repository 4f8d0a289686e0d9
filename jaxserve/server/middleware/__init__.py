"""The middleware that every request passes before a route, in the order of `app`: identity, path, limits, key."""
