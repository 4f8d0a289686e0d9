"""Finding the syntax of a model: by name, from its checkpoint, by marks of its chat template, or read off that."""
