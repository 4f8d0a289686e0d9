"""Anthropic's Messages API except for its routes: requests become chats, answers written as content blocks."""
