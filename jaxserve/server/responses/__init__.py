"""/v1/responses beside its route: items made into a conversation, answers written as items, kept and relayed."""
