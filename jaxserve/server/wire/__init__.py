"""What every part of the server needs to read requests and write answers: HTTP, bodies, errors and event streams."""
