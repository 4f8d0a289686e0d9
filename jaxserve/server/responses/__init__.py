"""/v1/responses apart from its route: convert items to a conversation, write answers as items, store and relay them."""
