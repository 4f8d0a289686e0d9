"""The JSON of the HTTP surface as msgspec structs: what clients may send, checked strictly, and what they get back."""
