"""The JSON of the HTTP API as msgspec structs: strictly checked requests, and answers."""
