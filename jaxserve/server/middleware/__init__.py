"""What every request passes before a route sees it, outermost first in `app`: identity, path, limits, key."""
