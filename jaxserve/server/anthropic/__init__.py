"""Anthropic's Messages API beside its route: requests made into chats, answers written as content blocks."""
