"""From a checked request to the engine and back: common to the routes that generate, embed or score."""
