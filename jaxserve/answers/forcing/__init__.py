"""Grammars in which an answer must be written: calls of the offered tools, held to their schemas, and thoughts."""
