"""Tools that a chat offers, and calls of them, as clients and models see them."""
